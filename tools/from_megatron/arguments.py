"""A Megatron-LM command's words as flags and their values, and what each turned out to be."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from parallel.errors import UserError
from tools.from_megatron.flags import Flag, known, nearest
from tools.from_megatron.gaps import gaps


@dataclass(slots=True)
class Arguments:
    """What a command says. Names are without dashes; the last of several wins, as with Megatron-LM."""

    given: dict[str, list[str]] = field(default_factory=dict)
    strays: list[str] = field(default_factory=list)
    """Words that belong to no flag, and unknown flags with theirs; each a sentence."""
    asked: set[str] = field(default_factory=set)
    """Flags that a rule has read."""

    def switch(self, name: str) -> bool:
        """Whether a flag is given."""
        self.asked.add(name)
        return name in self.given

    def raw(self, name: str) -> list[str]:
        """All values of a flag, as a script has them: they may hold gaps. Empty where it is not given."""
        self.asked.add(name)
        return self.given.get(name, [])

    def texts(self, name: str) -> list[str]:
        """All values of a flag. Raises UserError where one is not known."""
        values = self.raw(name)
        for text in values:
            refuse_gaps(name, text)
        return values

    def text(self, name: str, default: str | None = None) -> str | None:
        """The value of a flag that takes one. Raises UserError where it is not known."""
        values = self.texts(name)
        return values[0] if values else default

    def whole(self, name: str, default: int | None = None) -> int | None:
        """The value as a whole number; an empty default means that there is none. Raises UserError."""
        text = self.text(name)
        return default if text is None else number(name, text, int)

    def real(self, name: str, default: float | None = None) -> float | None:
        """The value as a number. Raises UserError."""
        text = self.text(name)
        return default if text is None else number(name, text, float)

    def required(self, *names: str) -> int:
        """A whole number that Megatron-LM demands too, under its first name or an older one. Raises UserError."""
        values = [value for name in names if (value := self.whole(name)) is not None]
        if not values:
            raise UserError(f"--{names[0]} is missing: Megatron-LM does not start without it either. Add it.")
        return values[0]


def number(name: str, text: str, kind: type) -> Any:
    """``kind(text)``. Raises UserError where it is not one."""
    try:
        return kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise UserError(f'--{name}: expected {what}, found "{text}".') from None


def refuse_gaps(name: str, text: str) -> None:
    """Raises UserError where a value that the model depends on holds a variable that is not known."""
    for line, what in gaps(text):
        way = f"Give it with --set {what[1:]}=VALUE." if not what.startswith("$(") else "Write its value in its place."
        raise UserError(f"line {line}: --{name} needs {what}, which the script does not set. {way}")


def parse(words: Sequence[str]) -> Arguments:
    """Flags and values; unknown flags take the words up to the next flag. Raises UserError for a missing value."""
    flags, arguments, at = known(), Arguments(), 0
    while at < len(words):
        name, equals, value = words[at].removeprefix("--").partition("=")
        at += 1
        if not words[at - 1].startswith("--"):
            arguments.strays.append(
                f'"{words[at - 1]}" belongs to no flag (the shell splits what is not quoted at blanks).'
            )
        elif name not in flags:
            until = at + _values(words[at:])
            written = " ".join([f"--{name}{equals}{value}", *words[at:until]])
            arguments.strays.append(f"{written} is no flag of Megatron-LM 0.19.2.{nearest(name, flags)}")
            at = until
        else:
            count = 0 if equals else _count(flags[name], words[at:])
            arguments.given[name] = [value] if equals else list(words[at : at + count])
            at += count
    return arguments


def _count(flag: Flag, rest: Sequence[str]) -> int:
    """How many of the words behind a flag are its values."""
    found = _values(rest)
    if flag.arity in "+*":
        wanted = found or int(flag.arity == "+")
    else:
        wanted = int(flag.arity)
    if found < wanted:
        raise UserError(f"--{flag.name} takes {wanted} value{'s' * (wanted > 1)}, found {found}. Add what is missing.")
    return wanted


def _values(rest: Sequence[str]) -> int:
    return next((count for count, word in enumerate(rest) if word.startswith("--")), len(rest))
