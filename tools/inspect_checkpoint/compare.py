"""Two checkpoints, tensor by tensor, whatever layout wrote each."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from program.printing import some
from tools.inspect_checkpoint.catalogue import Checkpoint
from tools.inspect_checkpoint.contents import Kind, Stored, StoredParameter
from tools.inspect_checkpoint.numbers import read, rectangles, values
from tools.inspect_checkpoint.text import columns, finite, number
from tools.shared.dtypes import FLOATS, cast
from training.checkpoint.format.pieces import ITEM_BYTES
from training.checkpoint.format.reader import FileReader
from training.config.deprecated import in_current_names

What = Literal["weights", "exp_avg", "exp_avg_sq", "momentum_buffer", "ema", "average_last", "generators", "other"]
Outcome = Literal["equal", "rounded", "differs", "shape", "dtype", "first", "second"]
Pair = tuple[str, What, Stored | None, Stored | None]

_OTHERS: dict[Kind, What] = {
    "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "momentum_buffer": "momentum_buffer", "ema": "ema",
    "average_last": "average_last", "rng": "generators", "other": "other",
}  # fmt: skip


@dataclass(kw_only=True, slots=True, frozen=True)
class Comparison:
    """One tensor in both checkpoints, or in one of them."""

    name: str
    what: What
    outcome: Outcome
    """equal: bit by bit. rounded: equal once the wider dtype is rounded to the other. first, second: only there."""
    sizes: tuple[str, str]
    """dtype and shape in each; empty where it is not there."""
    bytes: int
    """In the first, or else in the second."""
    max_abs: float | None = None
    """Largest difference of two elements; infinite where only one is a number. None: not measured."""
    relative: float | None = None
    """Norm of the difference over the larger of the two norms."""

    @property
    def is_same(self) -> bool:
        """Nothing that a reader would notice."""
        return self.outcome in ("equal", "rounded")

    def to_json(self) -> dict[str, Any]:
        """Null for differences that are not finite."""
        return asdict(self) | {"max_abs": finite(self.max_abs), "relative": finite(self.relative)}


def pairs(first: Sequence[StoredParameter], second: Sequence[StoredParameter]) -> list[Pair]:
    """What is compared with what: weights by the fp32 masters where there are any, in the first's order."""
    one, other = (
        {(parameter.name, what): stored for parameter in side for what, stored in _stored(parameter)}
        for side in (first, second)
    )
    return [
        (name, what, one.get((name, what)), other.get((name, what))) for name, what in dict.fromkeys([*one, *other])
    ]


def compare(
    found: Sequence[Pair], one: FileReader, other: FileReader, report: Callable[[int], Any]
) -> list[Comparison]:
    """Every pair; ``report`` is called with the bytes of each. Raises DamagedError where a file is too short."""
    result = []
    for name, what, first, second in found:
        result.append(_compare(name, what, first, second, one, other))
        report(result[-1].bytes)
    return result


def _stored(parameter: StoredParameter) -> Iterator[tuple[What, Stored]]:
    if parameter.weights:
        yield "weights", parameter.weights
    for kind, what in _OTHERS.items():
        if kind in parameter.states:
            yield what, parameter.states[kind]


def _compare(
    name: str, what: What, first: Stored | None, second: Stored | None, one: FileReader, other: FileReader
) -> Comparison:
    max_abs = relative = None
    outcome: Outcome
    if first is None or second is None:
        outcome = "first" if first else "second"
    elif first.shape != second.shape:
        outcome = "shape"
    elif first.dtype != second.dtype and not {first.dtype, second.dtype} <= set(FLOATS):
        outcome = "dtype"
    elif _is_equal(first, second, one, other):
        outcome = "equal" if first.dtype == second.dtype else "rounded"
    else:
        outcome = "differs"
        if what != "generators":
            max_abs, relative = _difference(first, second, one, other)
    sizes = tuple(f"{side.dtype} {list(side.shape)}" if side else "" for side in (first, second))
    size = max(first.bytes if first else 0, second.bytes if second else 0)
    return Comparison(
        name=name,
        what=what,
        outcome=outcome,
        sizes=(sizes[0], sizes[1]),
        bytes=size,
        max_abs=max_abs,
        relative=relative,
    )


def _blocks(
    first: Stored, second: Stored, one: FileReader, other: FileReader
) -> Iterator[tuple[np.ndarray, np.ndarray, str]]:
    """Both tensors' words, block by block, in the dtype of fewer bytes: what the other is rounded to."""
    dtype = min(first.dtype, second.dtype, key=lambda name: ITEM_BYTES[name])
    if first.dtype != second.dtype and ITEM_BYTES[first.dtype] == ITEM_BYTES[second.dtype]:
        dtype = "float32"  # bfloat16 and float16: each fits into it exactly
    for offset, shape in rectangles(first.shape):
        words = [read(reader, side, offset, shape) for reader, side in ((one, first), (other, second))]
        if first.dtype != second.dtype:
            words = [cast(words[0], first.dtype, dtype), cast(words[1], second.dtype, dtype)]
        yield words[0], words[1], dtype


def _is_equal(first: Stored, second: Stored, one: FileReader, other: FileReader) -> bool:
    return all(np.array_equal(a, b) for a, b, _ in _blocks(first, second, one, other))


def _difference(first: Stored, second: Stored, one: FileReader, other: FileReader) -> tuple[float, float]:
    """Largest, and relative. Read once more: only what differs is worth the arithmetic."""
    largest, difference, norms = 0.0, 0.0, np.zeros(2)
    for a, b, dtype in _blocks(first, second, one, other):
        x, y = (values(words, dtype).reshape(-1).astype(np.float64) for words in (a, b))
        with np.errstate(invalid="ignore"):
            apart = np.abs(x - y)
        apart[a.reshape(-1) == b.reshape(-1)] = 0  # infinities and NaNs that are the same
        apart[np.isnan(apart)] = np.inf
        largest = max(largest, float(apart.max(initial=0)))
        difference += float(np.dot(apart, apart))
        norms += [float(np.dot(side, side)) for side in (np.nan_to_num(x), np.nan_to_num(y))]
    if not math.isfinite(difference):
        return largest, math.inf
    return largest, math.sqrt(difference / norms.max()) if difference else 0.0


# ---- two checkpoints' progress, state and configuration, field by field


UNSET = "unset"


@dataclass(slots=True, frozen=True)
class Field:
    """One that differs."""

    name: str
    """Dotted, with the file's section first: ``progress.iteration``, ``config.optimizer.lr``."""
    first: Any
    second: Any


def differing(one: Checkpoint, other: Checkpoint) -> list[Field]:
    """Every field of state.json and config.toml that is not the same in both, sorted within each file."""
    return [*_pairs("", one.state, other.state), *_pairs("config.", *map(in_current_names, (one.config, other.config)))]


def _pairs(prefix: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Field]:
    first, second = dict(_flat(one, prefix)), dict(_flat(other, prefix))
    for name in dict.fromkeys([*first, *second]):
        if (values := (first.get(name, UNSET), second.get(name, UNSET)))[0] != values[1]:
            yield Field(name, *values)


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every leaf; lists of tables are counted."""
    if isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value):
        value = {str(number): entry for number, entry in enumerate(value)}
    if not isinstance(value, Mapping):
        yield name.removesuffix("."), value
        return
    for key, entry in value.items():
        yield from _flat(entry, f"{name}{key}.")


# ---- what differs between two checkpoints, as text: the largest differences first, and few lines


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
            yield f"{text}: {len(names):,} of {what}: {some(names, 3)}"


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
