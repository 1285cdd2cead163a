"""``{a,b}`` and ``{1..4}``."""

import itertools
import re
from dataclasses import replace

from parallel.errors import UserError
from tools.from_megatron.shell.syntax import Literal, ParameterExpansion, Part, Word
from tools.from_megatron.shell.word_reader import merged

type _Flat = list[str | Part]
"""Characters that are not quoted, and parts of other kinds."""

_NUMBERS = re.compile(r"(-?\d{1,18})\.\.(-?\d{1,18})(?:\.\.(-?\d{1,18}))?")
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.(-?\d{1,18}))?")
MOST_WORDS = 10_000


def braces(word: Word, line: int) -> list[Word]:
    """The words that one with braces becomes. Raises UserError for very many."""
    if not any(isinstance(part, Literal) and not part.quoted and "{" in part.text for part in word):
        return [word]
    flat: _Flat = []
    for part in word:
        flat += list(part.text) if isinstance(part, Literal) and not part.quoted else [part]
    return [
        merged([Literal(one) if isinstance(one, str) else one for one in _longer_names(each)])
        for each in _expanded(flat, line)
    ]


def _longer_names(flat: _Flat) -> _Flat:
    """``$A{b,c}`` is ``$Ab $Ac``: braces come before variables."""
    found: _Flat = []
    for one in flat:
        before = found[-1] if found else None
        if (
            isinstance(one, str) and isinstance(before, ParameterExpansion) and before.written == f"${before.name}"
            and before.name.isidentifier() and not before.quoted and (one.isalnum() or one == "_") and one.isascii()
        ):  # fmt: skip
            found[-1] = replace(before, name=before.name + one, written=before.written + one)
        else:
            found.append(one)
    return found


def _expanded(flat: _Flat, line: int) -> list[_Flat]:
    for at, one in enumerate(flat):
        if one == "{" and (alternatives := _alternatives(flat, at, line)) is not None:
            choices, end = alternatives
            rests = _expanded(flat[end:], line)
            inner = [each for choice in choices for each in _expanded(choice, line)]
            if len(inner) * len(rests) > MOST_WORDS:
                raise UserError(f"line {line}: braces that make more than {MOST_WORDS:,} words.")
            return [flat[:at] + each + rest for each in inner for rest in rests]
    return [flat]


def _alternatives(flat: _Flat, at: int, line: int) -> tuple[list[_Flat], int] | None:
    """What stands between the braces that begin here, and where they end; None where they are plain text."""
    depth, commas = 0, list[int]()
    for end in range(at, len(flat)):
        one = flat[end]
        depth += (one == "{") - (one == "}")
        if one == "," and depth == 1:
            commas.append(end)
        if not depth:
            break
    else:
        return None
    if commas:
        edges = [at, *commas, end]
        return [flat[left + 1 : right] for left, right in itertools.pairwise(edges)], end + 1
    inside = flat[at + 1 : end]
    if not all(isinstance(one, str) for one in inside):
        return None
    sequence = _sequence("".join(map(str, inside)), line)
    return None if sequence is None else ([list(each) for each in sequence], end + 1)


def _sequence(text: str, line: int) -> list[str] | None:
    if match := _NUMBERS.fullmatch(text):
        first, last = int(match[1]), int(match[2])
        zeros = [one for one in match.groups()[:2] if re.match(r"-?0\d", one)]
        width = max(len(match[1]), len(match[2])) if zeros else 0
        return [f"{number:0{width}d}" for number in _steps(first, last, match[3], line)]
    if match := _LETTERS.fullmatch(text):
        return [chr(code) for code in _steps(ord(match[1]), ord(match[2]), match[3], line)]
    return None


def _steps(first: int, last: int, step: str | None, line: int) -> range:
    size = abs(int(step or 1)) or 1
    if abs(last - first) // size >= MOST_WORDS:
        raise UserError(f"line {line}: braces that make more than {MOST_WORDS:,} words.")
    return range(first, last + 1, size) if first <= last else range(first, last - 1, -size)
