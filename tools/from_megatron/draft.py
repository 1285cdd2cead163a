"""A recipe in the making: values with their sources, and everything that could not become one."""

import types
import typing
from dataclasses import dataclass, field
from typing import Any

from parallel.schema import fits, type_name
from tools.from_megatron.arguments import Arguments, number
from tools.from_megatron.flags_translated import Default
from tools.from_megatron.gaps import gaps, readable
from training.config.recipe import names

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
