"""What differs between two checkpoints, as text: the largest differences first, and few lines."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.inspect_checkpoint.compare import Comparison
from tools.inspect_checkpoint.fields import Field
from tools.inspect_checkpoint.text import columns, number, some

ONLY = {"first": "only in the first", "second": "only in the second"}


def report(one: Path, other: Path, tensors: Sequence[Comparison], found: Sequence[Field], top: int) -> list[str]:
    """Fields, tensors that cannot be compared, tensors that differ, and the summary."""
    blocks = [
        [f"first   {one}", f"second  {other}"],
        _fields(found, top),
        [*_only(tensors), *_unlike(tensors, top)],
        _values(tensors, top),
        [summary(tensors, found)],
    ]
    lines = [line for block in blocks if block for line in [*block, ""]]
    return lines[:-1]


def summary(tensors: Sequence[Comparison], found: Sequence[Field]) -> str:
    """One line."""
    parts = []
    for what in dict.fromkeys(one.what for one in tensors):
        kind = [one for one in tensors if one.what == what]
        same = sum(one.is_same for one in kind)
        rounded = sum(one.outcome == "rounded" for one in kind)
        most = max((one.relative for one in kind if one.relative is not None), default=None)
        notes = [f"{rounded:,} once rounded"] if rounded else []
        notes += [f"relative difference up to {number(most)}"] if most is not None else []
        parts.append(f"{what} {same:,} of {len(kind):,} equal{f' ({", ".join(notes)})' if notes else ''}")
    fields = f"{len(found)} {'field differs' if len(found) == 1 else 'fields differ'}" if found else "all fields equal"
    return f"{'same' if is_same(tensors, found) else 'different'}: {'; '.join([*parts, fields])}"


def is_same(tensors: Sequence[Comparison], found: Sequence[Field]) -> bool:
    """Whether nothing differs."""
    return not found and all(one.is_same for one in tensors)


def _fields(found: Sequence[Field], top: int) -> list[str]:
    rows = [("field", "first", "second"), *((one.name, str(one.first), str(one.second)) for one in found[:top])]
    return [*columns(rows), *_more(len(found), top)] if found else []


def _only(tensors: Sequence[Comparison]) -> Iterator[str]:
    for outcome, text in ONLY.items():
        for what in dict.fromkeys(one.what for one in tensors if one.outcome == outcome):
            names = [one.name for one in tensors if one.outcome == outcome and one.what == what]
            yield f"{text}: {len(names):,} of {what}: {some(names)}"


def _unlike(tensors: Sequence[Comparison], top: int) -> Iterator[str]:
    found = [one for one in tensors if one.outcome in ("shape", "dtype")]
    for one in found[:top]:
        yield f"other {one.outcome}: {one.name} ({one.what}): {one.sizes[0]}, {one.sizes[1]}"
    yield from _more(len(found), top)


def _values(tensors: Sequence[Comparison], top: int) -> list[str]:
    found = [one for one in tensors if one.outcome == "differs"]
    found.sort(key=lambda one: -math.inf if one.relative is None else -one.relative)
    rows = [("tensor", "of", "relative", "max abs")]
    rows += [(one.name, one.what, number(one.relative), number(one.max_abs)) for one in found[:top]]
    return [*columns(rows, right=(2, 3)), *_more(len(found), top)] if found else []


def _more(count: int, top: int) -> list[str]:
    return [f"... and {count - top:,} more (--top)"] if count > top else []
