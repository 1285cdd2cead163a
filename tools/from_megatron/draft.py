"""A recipe in the making: values with their sources, and everything that could not become one."""

import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from program.schema import fits, type_name
from tools.from_megatron.arguments import Arguments, number
from tools.from_megatron.flags_translated import Default
from tools.from_megatron.unknown import OpenText, ScriptWord, Unknown, joined
from training.config.recipe import names

DEFAULT = "Megatron-LM's default"
_TRAINED = ("model.", "data.", "optimizer.")
"""Sections that say what is trained, and not how fast."""


_SAME_WORDS = {("lr-wsd-decay-style", "1-sqrt"): "minus_sqrt"}
"""Words of forks for what Megatron-LM and Triplane call otherwise, by flag."""


@dataclass(slots=True)
class Draft:
    """What ``translate`` fills."""

    arguments: Arguments
    world: int | None = None
    """Ranks that the script starts, where it says so."""
    values: dict[str, Any] = field(default_factory=dict)
    """By dotted name, e.g. ``model.num_layers``."""
    sources: dict[str, str] = field(default_factory=dict)
    """Where each value comes from."""
    notes: list[str] = field(default_factory=list)
    """What is translated, but worth knowing."""
    irrelevant: list[str] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)
    other_model: list[str] = field(default_factory=list)
    """What is not translated, and without which it is another model or another training."""
    not_understood: list[str] = field(default_factory=list)
    """What changes the model, the data or a schedule, and is not understood."""
    overrides: bool = False
    """Whether it changes another recipe, which says what is missing here."""
    open: list[str] = field(default_factory=list)
    """Values that hold what the script does not set."""
    wanted: list[Unknown] = field(default_factory=list)
    """What that is."""

    def put(self, name: str, value: Any, source: str) -> None:
        """Give a field its value; None leaves it out."""
        if value is not None:
            self.values[name], self.sources[name] = value, source

    def add(self, name: str, entry: str, source: str) -> None:
        """One more entry of a list; a second flag for the same one changes nothing."""
        entries, sources = self.values.setdefault(name, []), self.sources.get(name)
        entries += [] if entry in entries else [entry]
        self.sources[name] = source if sources is None else f"{sources} {source}"

    def fields(self, table: dict[str, tuple[str, Default]]) -> None:
        """Fields that are one flag's value each."""
        types_of = names()
        for flag, (name, default) in table.items():
            text = self.arguments.text(flag)
            if text is None:
                self.put(name, default, DEFAULT)
            else:
                self.put(name, self.convert(flag, text, types_of[name], name), f"--{flag}")

    def switches(self, table: dict[str, tuple[str, bool]]) -> None:
        """Fields that a flag's presence sets."""
        for flag, (name, value) in table.items():
            present = self.arguments.switch(flag)
            self.put(name, value if present else not value, f"--{flag}" if present else f"no --{flag}")

    def convert(self, flag: str, text: str, expected: Any, name: str = "") -> Any:
        """The text as a field's type; None, and a line that says so, where it is a word that we do not know.

        name: of the field; one of _TRAINED's makes another model or training. Raises UserError for what is not a
        number.
        """
        choices = typing.get_args(expected) if typing.get_origin(expected) in (types.UnionType, typing.Union) else ()
        for choice in (choice for choice in choices or (expected,) if choice is not types.NoneType):
            if choice in (int, float):
                return number(flag, text, choice)
            if fits(text, choice):
                return text
            words = typing.get_args(choice) if typing.get_origin(choice) is typing.Literal else ()
            text = _SAME_WORDS.get((flag, text.lower()), text)
            if same := [word for word in words if isinstance(word, str) and _spelled(word) == _spelled(text)]:
                return same[0]  # forks spell it otherwise: rmsnorm
        lines = self.other_model if name.startswith(_TRAINED) else self.unsupported
        lines.append(f"--{flag} {text}: Triplane knows {type_name(expected)}.")
        return None

    def path(self, flag: str, what: str) -> str | None:
        """A flag's value that the model does not depend on; where it is not known, it is left open."""
        word = next(iter(self.arguments.raw(flag)), None)
        if word is None or isinstance(word, str):
            return word
        self.leave_open(flag, [word], what)
        return None

    def only_with(self, needed: str, flags: Iterable[str], on: bool = False) -> None:
        """Note flags that are given, and that Megatron-LM reads only beside another one. on: whether that is given."""
        for flag in flags:
            if self.arguments.switch(flag) and not on:
                self.irrelevant.append(f"--{flag}: has no effect without --{needed}")

    def leave_open(self, flag: str, words: Sequence[ScriptWord], what: str) -> None:
        """Note a value that holds what the script does not set."""
        unknowns = [each for word in words if isinstance(word, OpenText) for each in word.unknowns]
        self.open.append(f"{what}: --{flag} {joined(words)}, and {said(unknowns)}.")
        self.wanted += unknowns


def _spelled(word: str) -> str:
    return word.lower().replace("_", "-")


def said(unknowns: Sequence[Unknown]) -> str:
    """``$1 is not set (line 4)``."""
    parts = dict.fromkeys(
        f"{each.written} is not {'set' if each.assumed == '' else 'known'}"
        + (f" (line {each.line})" if each.line else "")
        for each in unknowns
    )
    return ", ".join(parts)
