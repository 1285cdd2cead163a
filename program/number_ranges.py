"""Ranges of whole numbers as a recipe lists them: 7, or "100-120", both ends included."""

import re
from collections.abc import Iterable, Sequence

type NumberRange = tuple[int, int]
"""[first, end)."""

MOST = 10**12


def read_ranges(given: Sequence[int | str]) -> tuple[NumberRange, ...]:
    """Ascending and apart, whatever the order and the overlaps were. Raises ValueError, which quotes what is none."""
    return merged(_read(one) for one in given)


def merged[N: (int, float)](ranges: Iterable[tuple[N, N]]) -> tuple[tuple[N, N], ...]:
    """The same numbers in as few ranges as can be, ascending."""
    found: list[tuple[N, N]] = []
    for first, end in sorted(ranges):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((first, end))
    return tuple(found)


def listed(ranges: Sequence[NumberRange], form: str = ",") -> str:
    """As ``read_ranges`` reads them; form: of a number, with separators of thousands."""
    return ", ".join(f"{first:{form}}" + (f"-{end - 1:{form}}" if end > first + 1 else "") for first, end in ranges)


def problems(name: str, given: Sequence[int | str], least: int) -> list[str]:
    """What is wrong with a field of this name, whose numbers begin with ``least``."""
    try:
        read = read_ranges(given)
    except ValueError as error:
        return [f'{name}: expected numbers as 7 or "100-120", {error}.']
    if read and not least <= read[0][0] <= read[-1][1] <= MOST:
        return [f"{name}: expected numbers from {least} to {MOST:,}, found {listed(read)}."]
    return []


def _read(given: int | str) -> NumberRange:
    match = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", str(given))
    if match is None:
        raise ValueError(f"found {given!r:.60}")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise ValueError(f'found "{given}", which ends before it begins')
    return first, last + 1
