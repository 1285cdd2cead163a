"""What only running a script would show: one character within a text of the shell, an ``OpenText`` outside of it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from parallel.errors import UserError

_FIRST, _LAST = 0xF0000, 0xFFFFD  # a private plane of Unicode, which no script needs
_MARK = re.compile(f"[{chr(_FIRST)}-{chr(_LAST)}]")


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
    splits: bool = False
    """Whether it may be several words, or none: it stands outside of quotes."""
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


class UnknownValues:
    """The unknown values of one reading: each is a character of its own, which no operation can cut into parts."""

    def __init__(self) -> None:
        self._all: list[Unknown] = []
        self._marks: dict[Unknown, str] = {}

    def mark(self, unknown: Unknown) -> str:
        """The character that stands for it; equal ones have the same. Raises UserError for very many."""
        if unknown not in self._marks:
            if len(self._all) > _LAST - _FIRST:
                raise UserError(f"line {unknown.line}: more than {len(self._all):,} unknown values.")
            self._marks[unknown] = chr(_FIRST + len(self._all))
            self._all.append(unknown)
        number = ord(self._marks[unknown]) - _FIRST
        if not self._all[number].line:
            self._all[number] = unknown
        return self._marks[unknown]

    def found(self, text: str) -> list[Unknown]:
        """Those in a text, in order."""
        return [self._all[ord(mark) - _FIRST] for mark in _MARK.findall(text)]

    def assumed(self, text: str) -> str:
        """The text as bash would have it, where that is known; marks of what is not stay."""
        return _MARK.sub(lambda mark: self._assumed(mark[0]), text)

    def without_branches(self, text: str) -> str:
        """The text with what is empty so left out; where nothing else is in it, it may be worth asking for."""
        known = _MARK.sub(lambda mark: "" if self.found(mark[0])[0].by_branch else mark[0], text)
        return known or text[:1]

    def splitting(self, text: str) -> str:
        """The text with unknown parts that may be several words, or none."""
        return _MARK.sub(lambda mark: self.mark(replace(self.found(mark[0])[0], splits=True)), text)

    def plain(self, text: str) -> str:
        """The text as one word."""
        return _MARK.sub(lambda mark: self.mark(replace(self.found(mark[0])[0], splits=False)), text)

    def splits(self, text: str) -> bool:
        """Whether it may be several words, or none."""
        return any(unknown.splits for unknown in self.found(text))

    def word(self, text: str) -> ScriptWord:
        """The text for whoever is not the shell."""
        unknowns = self.found(text)
        if not unknowns:
            return text
        return OpenText(_MARK.sub(lambda mark: self.found(mark[0])[0].written, text), tuple(unknowns))

    def readable(self, text: str) -> str:
        """As it stands in the script."""
        return str(self.word(text))

    def _assumed(self, mark: str) -> str:
        assumed = self._all[ord(mark) - _FIRST].assumed
        return mark if assumed is None else assumed


def has_unknown(text: str) -> bool:
    """Whether a text of the shell has an unknown part."""
    return _MARK.search(text) is not None


def without_marks(text: str) -> str:
    """What is known of a text; also what a script may hold, where somebody put such characters into it."""
    return _MARK.sub("", text)


def head_and_tail(text: str) -> tuple[str, str]:
    """What stands before the first unknown part, and behind the last one."""
    parts = _MARK.split(text)
    return parts[0], parts[-1]


def joined(words: Sequence[ScriptWord]) -> str:
    """Words as text for people."""
    return " ".join(map(str, words))
