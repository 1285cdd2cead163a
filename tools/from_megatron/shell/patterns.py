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


@dataclass(frozen=True, slots=True)
class Bracket:
    """``[a-z[:digit:]]``."""

    ranges: tuple[tuple[str, str], ...]
    classes: tuple[str, ...]
    negated: bool

    def matches(self, one: str) -> bool:
        inside = any(low <= one <= high for low, high in self.ranges)
        return (inside or any(_CLASSES[name](one) for name in self.classes)) is not self.negated


@dataclass(frozen=True, slots=True)
class PatternGroup:
    """``@(a|b)`` and its like."""

    sign: str
    choices: "tuple[Pattern, ...]"


type Pattern = list[str | Bracket | PatternGroup]
"""Characters; ``*`` as an empty text, ``?`` as two characters."""

_ANY, _ONE = "", "??"


def pattern(pieces: Sequence[tuple[str, bool]], extended: bool = False) -> Pattern:
    """Of text with whether it is quoted. extended: ``@(a|b)`` and its like mean something."""
    return _pattern([(one, quoted) for text, quoted in pieces for one in text], extended)


def _pattern(flat: list[tuple[str, bool]], extended: bool) -> Pattern:
    found: Pattern = []
    at = 0
    while at < len(flat):
        one, quoted = flat[at]
        opens = extended and not quoted and one in "@?*+!" and flat[at + 1 : at + 2] == [("(", False)]
        if opens and (group := _group(flat, at)) is not None:
            found.append(group[0])
            at = group[1]
        elif not quoted and one == "\\" and at + 1 < len(flat):
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


def has_glob(pieces: Sequence[tuple[str, bool]], extended: bool = False) -> bool:
    """Whether names of files would be put in the place of a word."""
    return any(not isinstance(one, str) or one in (_ANY, _ONE) for one in pattern(pieces, extended))


def _group(flat: list[tuple[str, bool]], at: int) -> tuple[PatternGroup, int] | None:
    """The group at this place and where it ends; None where it is never closed."""
    depth, starts = 0, [at + 2]
    for end in range(at + 1, len(flat)):
        one = "" if flat[end][1] or flat[end - 1] == ("\\", False) else flat[end][0]
        depth += (one == "(") - (one == ")")
        if depth == 1 and one == "|":
            starts.append(end + 1)
        elif depth == 0:
            ends = [start - 1 for start in starts[1:]] + [end]
            choices = (_pattern(flat[start:stop], True) for start, stop in zip(starts, ends, strict=True))
            return PatternGroup(flat[at][0], tuple(choices)), end
    return None


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
    size, deep = _size(what)
    if size * len(text) ** (deep + 1) > MOST_STEPS * (10 if deep else 1):
        raise UserError(f"a pattern of {size:,} characters over a text of {len(text):,}: too long.")
    return sorted(_reached(what, text, {0}))


def _size(what: Pattern) -> tuple[int, int]:
    """How many characters a pattern has, and how deep its groups are."""
    inner = [_size(choice) for one in what if isinstance(one, PatternGroup) for choice in one.choices]
    return len(what) + sum(size for size, _ in inner), max((deep + 1 for _, deep in inner), default=0)


def _reached(what: Pattern, text: str, reached: set[int]) -> set[int]:
    """Where a match may end that begins at one of these places."""
    for one in what:
        if one == _ANY:
            reached = set(range(min(reached), len(text) + 1)) if reached else reached
        elif one == _ONE:
            reached = {at + 1 for at in reached if at < len(text)}
        elif isinstance(one, PatternGroup):
            reached = _behind_group(one, text, reached)
        else:
            fits = one.matches if isinstance(one, Bracket) else one.__eq__
            reached = {at + 1 for at in reached if at < len(text) and fits(text[at])}
    return reached


def _behind_group(group: PatternGroup, text: str, reached: set[int]) -> set[int]:
    def once(starts: set[int]) -> set[int]:
        return {end for choice in group.choices for end in _reached(choice, text, starts)}

    if group.sign == "!":
        return {end for at in reached for end in set(range(at, len(text) + 1)) - once({at})}
    found = set(reached) if group.sign in "?*" else set[int]()
    new = once(reached) - found
    while new:
        found |= new
        new = once(new) - found if group.sign in "*+" else set[int]()
    return found


def suffixes(what: Pattern, text: str) -> list[int]:
    """The lengths of all ends of a text that match the whole pattern, in order."""
    return prefixes(_backwards(what), text[::-1])


def _backwards(what: Pattern) -> Pattern:
    return [
        PatternGroup(one.sign, tuple(map(_backwards, one.choices))) if isinstance(one, PatternGroup) else one
        for one in reversed(what)
    ]


def folded(pieces: Sequence[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """As ``shopt -s nocasematch`` compares them."""
    return [("".join(one.lower() if len(one.lower()) == 1 else one for one in text), quoted) for text, quoted in pieces]


def matches(what: Pattern, text: str) -> bool:
    """Whether the whole text matches."""
    return len(text) in prefixes(what, text)


def replaced(what: Pattern, text: str, by: str, everywhere: bool, compared: str | None = None) -> str:
    """The first or each longest match replaced. compared: the text that is matched, where letters' case is all the
    same."""
    if len(what) * len(text) * max(len(text), 1) > MOST_STEPS * 20:
        raise UserError(f"a pattern of {len(what):,} characters replaced in a text of {len(text):,}: too long.")
    if not text and matches(what, ""):
        return by
    parts, at = list[str](), 0
    while at < len(text):
        lengths = prefixes(what, (compared or text)[at:])
        if lengths:
            parts.append(by)
            at += lengths[-1]
            if not everywhere:
                break
        if lengths[-1:] in ([], [0]):
            parts.append(text[at])
            at += 1
    return "".join(parts) + text[at:]
