"""Values that a script does not set: marks in what bash runs with, an ``OpenText`` outside of it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

MARK = re.compile(r"_42070(\d+)_")
"""A name in arithmetic, a word elsewhere, the same in capitals and small letters (``shell/prelude.sh`` knows it)."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """A value that is not known, as it stands in the script."""

    written: str
    """``$NAME``, ``$(date +%s)``."""
    line: int = field(default=0, compare=False)
    sets: tuple[str, ...] = ()
    """What --set can give so that it is known; empty: nothing does."""
    assumed: str | None = None
    """What bash has for it where nothing is given: "" for a variable that is not set. None: that is not known."""
    by_branch: bool = False
    """Whether the script sets it only in a branch that is not taken, for want of what ``sets`` can give."""


@dataclass(frozen=True, slots=True)
class OpenText:
    """A word of a command with unknown parts. As text, it is what the script says."""

    text: str
    unknowns: tuple[Unknown, ...]

    def __str__(self) -> str:
        return self.text


type ScriptWord = str | OpenText
"""A word as a program would receive it."""


class Marks:
    """The unknown values of one script, and the text that stands for each while bash runs."""

    def __init__(self) -> None:
        self._all: dict[str, Unknown] = {}

    def mark(self, unknown: Unknown, key: str = "") -> str:
        """The text that stands for it, which is the same for all of a key (by default, as it is written)."""
        key = key or unknown.written
        self._all.setdefault(key, unknown)
        return f"_42070{list(self._all).index(key)}_"

    def of(self, key: str) -> Unknown:
        """The value of a key."""
        return self._all[key]

    def replace(self, key: str, unknown: Unknown) -> None:
        """Say something else of it."""
        self._all[key] = unknown

    def found(self, text: str) -> list[Unknown]:
        """Those in a text, in order."""
        everything = list(self._all.values())
        return [everything[int(number)] for number in MARK.findall(text) if int(number) < len(everything)]

    def readable(self, text: str) -> str:
        """As it stands in the script."""
        return MARK.sub(lambda mark: "".join(each.written for each in self.found(mark[0])), text)

    def word(self, text: str) -> ScriptWord:
        """The text for whoever is not the shell."""
        unknowns = self.found(text)
        return OpenText(self.readable(text), tuple(unknowns)) if unknowns else text


def joined(words: Sequence[ScriptWord]) -> str:
    """Words as text for people."""
    return " ".join(map(str, words))
