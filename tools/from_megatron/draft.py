"""A recipe in the making: values with their sources, and everything that could not become one."""

import json
import textwrap
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tomli_w

from parallel.schema import fits, type_name
from tools.from_megatron.arguments import Arguments, number
from tools.from_megatron.flags_translated import Default
from tools.from_megatron.gaps import gaps, readable
from training.config.recipe import names, sections

DEFAULT = "Megatron-LM's default"


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
    open: list[str] = field(default_factory=list)
    """Values that hold variables which the script does not set."""

    def put(self, name: str, value: Any, source: str) -> None:
        """Give a field its value; None leaves it out."""
        if value is not None:
            self.values[name], self.sources[name] = value, source

    def fields(self, table: dict[str, tuple[str, Default]]) -> None:
        """Fields that are one flag's value each."""
        types_of = names()
        for flag, (name, default) in table.items():
            text = self.arguments.text(flag)
            if text is None:
                self.put(name, default, DEFAULT)
            else:
                self.put(name, self.convert(flag, text, types_of[name]), f"--{flag}")

    def switches(self, table: dict[str, tuple[str, bool]]) -> None:
        """Fields that a flag's presence sets."""
        for flag, (name, value) in table.items():
            present = self.arguments.switch(flag)
            self.put(name, value if present else not value, f"--{flag}" if present else f"no --{flag}")

    def convert(self, flag: str, text: str, expected: Any) -> Any:
        """The text as a field's type; None, and a line under unsupported, where it is a word that we do not know.

        Raises UserError for what is not a number.
        """
        choices = typing.get_args(expected) if typing.get_origin(expected) in (types.UnionType, typing.Union) else ()
        for choice in (choice for choice in choices or (expected,) if choice is not types.NoneType):
            if choice in (int, float):
                return number(flag, text, choice)
            if fits(text, choice):
                return text
        self.unsupported.append(f"--{flag} {text}: Triplane knows {type_name(expected)}.")
        return None

    def path(self, flag: str, what: str) -> str | None:
        """A flag's value that the model does not depend on; where it is not known, it is left open."""
        text = next(iter(self.arguments.raw(flag)), None)
        if text is None or not gaps(text):
            return text
        self.leave_open(flag, text, what)
        return None

    def leave_open(self, flag: str, text: str, what: str) -> None:
        """Note a value that holds variables which the script does not set."""
        line, variable = gaps(text)[0]
        self.open.append(
            f"{what}: --{flag} {readable(text)}, but {variable} is not set (line {line}). Write it into the recipe"
            + ("." if variable.startswith("$(") else f", or give --set {variable[1:]}=VALUE.")
        )


# ---- a draft as TOML: a head of comments that says what was left behind, then each value with its source


_WIDTH = 110


def toml(draft: Draft, origin: str, problems: Sequence[str]) -> str:
    """The recipe that ``training.config.recipe.load`` reads.

    origin: a sentence on where it comes from. problems: what a run of it would refuse.
    """
    parts = [_comment([f"Made by tools.from_megatron: {origin}"]), *map(_comment_block, summary(draft, problems))]
    parts.append(_table(draft, ""))
    for section in sections():
        if any(name.startswith(f"{section}.") for name in draft.values):
            parts.append(f"\n[{section}]\n{_table(draft, f'{section}.')}")
    return "".join(parts)


def summary(draft: Draft, problems: Sequence[str]) -> list[list[str]]:
    """What the user should know: blocks of a heading and lines; empty ones are left out."""
    blocks = [
        ["A run of this recipe would be refused:", *problems],
        ["Not known to Megatron-LM 0.19.2, and left out:", *draft.arguments.strays],
        ["Not supported, and left out:", *draft.unsupported],
        ["Left open:", *draft.open],
        ["Worth knowing:", *draft.notes],
        ["Changes nothing here:", *_by_reason(draft.irrelevant)],
    ]
    return [block for block in blocks if len(block) > 1]


def _by_reason(lines: Sequence[str]) -> list[str]:
    """Flags that share a reason share a line."""
    found: dict[str, list[str]] = {}
    for line in lines:
        flag, _, reason = line.partition(": ")
        found.setdefault(reason, []).append(flag)
    return [f"{', '.join(flags)}: {reason}." for reason, flags in found.items()]


def _comment_block(lines: Sequence[str]) -> str:
    return "#\n" + _comment([lines[0], *(f"- {line}" for line in lines[1:])])


def _comment(lines: Sequence[str]) -> str:
    wrapped = (
        textwrap.wrap(line, _WIDTH - 2, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for line in lines
    )
    return "".join(f"# {line}\n" for lines_ in wrapped for line in lines_)


def _table(draft: Draft, prefix: str) -> str:
    """The values of one section, or with an empty prefix those of none, each with a comment."""
    written = []
    for name, value in draft.values.items():
        key = name.removeprefix(prefix)
        if name.startswith(prefix) and "." not in key:
            written.append(f"{key} = {_value(value)}  # {draft.sources[name]}\n")
    return "".join(written)


def _value(value: object) -> str:
    """On one line. Words and lists of words and numbers are written by JSON as by TOML."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_value(item)}" for key, item in value.items()) + " }"
    return json.dumps(value) if isinstance(value, list) else tomli_w.dumps({"x": value}).strip().removeprefix("x = ")
