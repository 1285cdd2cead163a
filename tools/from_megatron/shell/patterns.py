"""Globs as bash matches them, in time that grows with the pattern's length times the text's."""

from collections.abc import Sequence
from dataclasses import dataclass

from parallel.errors import UserError

_CLASSES = {
    "digit": str.isdigit, "alpha": str.isalpha, "alnum": str.isalnum, "space": str.isspace, "upper": str.isupper,
    "lower": str.islower, "punct": lambda one: one.isprintable() and not one.isalnum() and not one.isspace(),
    "blank": lambda one: one in " \t", "xdigit": lambda one: one in "0123456789abcdefABCDEF",
}  # fmt: skip
MOST_STEPS = 2_000_000
"""Of one match: characters of the pattern times those of the text."""


class UnknownPattern(Exception):
    """An extended pattern, such as @(a|b), which is not followed."""


@dataclass(frozen=True, slots=True)
class Bracket:
    """``[a-z[:digit:]]``."""

    ranges: tuple[tuple[str, str], ...]
    classes: tuple[str, ...]
    negated: bool

    def matches(self, one: str) -> bool:
        inside = any(low <= one <= high for low, high in self.ranges)
        return (inside or any(_CLASSES[name](one) for name in self.classes)) is not self.negated


type Pattern = list[str | Bracket]
"""Characters; ``*`` as an empty text, ``?`` as two characters."""

_ANY, _ONE = "", "??"


def pattern(pieces: Sequence[tuple[str, bool]], extended: bool = False) -> Pattern:
    """Of text with whether it is quoted. Raises UnknownPattern where ``extended`` ones are meant."""
    flat = [(one, quoted) for text, quoted in pieces for one in text]
    found: Pattern = []
    at = 0
    while at < len(flat):
        one, quoted = flat[at]
        if not quoted and extended and one in "@?*+!" and flat[at + 1 : at + 2] == [("(", False)]:
            raise UnknownPattern
        if not quoted and one == "\\" and at + 1 < len(flat):
            at += 1
            found.append(flat[at][0])
        elif quoted or one not in "*?[":
            found.append(one)
        elif one == "[" and (bracket := _bracket(flat, at)) is not None:
            found.append(bracket[0])
            at = bracket[1]
        elif one != "*" or found[-1:] != [_ANY]:
            found.append({"*": _ANY, "?": _ONE}.get(one, one))
        at += 1
    return found


def has_glob(pieces: Sequence[tuple[str, bool]]) -> bool:
    """Whether names of files would be put in the place of a word."""
    return any(isinstance(one, Bracket) or one in (_ANY, _ONE) for one in pattern(pieces))


def _bracket(flat: list[tuple[str, bool]], at: int) -> tuple[Bracket, int] | None:
    """The bracket at this place and where it ends; None where it is a plain [."""
    text = "".join(one for one, _ in flat)
    start = at + 1
    negated = text[start : start + 1] in ("!", "^") and not flat[start][1]
    start += negated
    end = start
    ranges, classes = list[tuple[str, str]](), list[str]()
    while end < len(text) and (text[end] != "]" or flat[end][1] or end == start):
        if text.startswith("[:", end) and (close := text.find(":]", end)) > 0:
            name = text[end + 2 : close]
            if name not in _CLASSES:
                return None
            classes.append(name)
            end = close + 2
            continue
        if text[end] == "\\" and not flat[end][1] and end + 1 < len(text):
            end += 1
        high = end + 2
        if text[end + 1 : end + 2] == "-" and not flat[end + 1][1] and text[high : high + 1] not in ("", "]"):
            ranges.append((text[end], text[high]))
            end = high + 1
        else:
            ranges.append((text[end], text[end]))
            end += 1
    return (Bracket(tuple(ranges), tuple(classes), negated), end) if end < len(text) else None


def prefixes(what: Pattern, text: str) -> list[int]:
    """The lengths of all beginnings of a text that match the whole pattern, in order. Raises UserError for huge."""
    if len(what) * len(text) > MOST_STEPS:
        raise UserError(f"a pattern of {len(what):,} characters over a text of {len(text):,}: too long.")
    reached = {0}
    for one in what:
        if one == _ANY:
            reached = set(range(min(reached), len(text) + 1)) if reached else reached
        elif one == _ONE:
            reached = {at + 1 for at in reached if at < len(text)}
        else:
            fits = one.matches if isinstance(one, Bracket) else one.__eq__
            reached = {at + 1 for at in reached if at < len(text) and fits(text[at])}
    return sorted(reached)


def suffixes(what: Pattern, text: str) -> list[int]:
    """The lengths of all ends of a text that match the whole pattern, in order."""
    return prefixes(what[::-1], text[::-1])


def matches(what: Pattern, text: str) -> bool:
    """Whether the whole text matches."""
    return len(text) in prefixes(what, text)


def replaced(what: Pattern, text: str, by: str, everywhere: bool) -> str:
    """The first or each longest match replaced."""
    if len(what) * len(text) * max(len(text), 1) > MOST_STEPS * 20:
        raise UserError(f"a pattern of {len(what):,} characters replaced in a text of {len(text):,}: too long.")
    if not text and matches(what, ""):
        return by
    parts, at = list[str](), 0
    while at < len(text):
        lengths = [length for length in prefixes(what, text[at:]) if length]
        if lengths:
            parts.append(by)
            at += lengths[-1]
            if not everywhere:
                break
        else:
            parts.append(text[at])
            at += 1
    return "".join(parts) + text[at:]
