"""A model's weights by another program's names: where each one's rows lie in theirs, in both directions."""

import dataclasses
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tools.reshard.tensors import Rectangle, RowRange, Tensors
from tools.shared.dtypes import cast
from training.checkpoint.format.pieces import ITEM_BYTES
from training.checkpoint.format.reader import WORDS

Names = Literal["transformers", "torchtitan"]
NewName = tuple[str, tuple[int, str] | None]
"""A name; and of one expert's matrix its number and which part of the stack's rows it is: first, second or all."""


@dataclass(slots=True, frozen=True)
class RowRun:
    """Rows of one of their tensors, and where they lie in ours."""

    name: str
    """Theirs."""
    start: int
    """First row in theirs, counted over all dims but the last."""
    row: int
    """First row in ours."""
    rows: int
    step: int = 1
    """Rows in theirs from one to the next."""


@dataclass(slots=True, frozen=True)
class Geometry:
    """How rows lie in their tensors: the last dim's opposite, unless this says otherwise."""

    transposed: bool = False
    """They are columns: [columns, rows], or [experts, columns, rows]."""
    vectors: bool = False
    """Ours is [experts, rows]: each element is a row."""
    unsqueezed: int | None = None
    """They have one more dim, of 1, at this place."""

    def core(self, dims: tuple[int, ...]) -> tuple[int, ...]:
        """A shape or an offset of theirs without that dim."""
        place = self.unsqueezed
        return dims if place is None else dims[:place] + dims[place + 1 :]

    def whole(self, dims: tuple[int, ...], one: int) -> tuple[int, ...]:
        """Inverse of ``core``. one: 1 of a shape, 0 of an offset."""
        place = self.unsqueezed
        return dims if place is None else (*dims[:place], one, *dims[place:])


PLAIN = Geometry()


@dataclass(slots=True, frozen=True)
class NamedWeight:
    """One of our weights, by their names."""

    key: str
    """Ours."""
    shape: tuple[int, ...]
    runs: tuple[RowRun, ...]
    """By our rows."""
    padded: bool
    """Ours ends with rows of padding."""
    geometry: Geometry


@dataclass(frozen=True)
class Naming:
    """All weights of a model by their names."""

    label: str
    family: Names
    weights: tuple[NamedWeight, ...]
    shapes: Mapping[str, tuple[int, ...]]
    """Of their tensors."""
    copies: Collection[str] = ()
    """Names of tensors that are others' equals: a tied output layer's."""
    padded: Collection[str] = field(default_factory=set)
    """Names of tensors that may have more rows: the vocabulary, rounded up."""
    constants: Mapping[str, float] = field(default_factory=dict)
    """Numbers beside the weights, the same in every model of this type, by their names."""
    computed: re.Pattern[str] = re.compile(r"(?!)")
    """Names of tensors that follow from the configuration."""


def renamed(naming: Naming, rename: Callable[[str], NewName], label: str = "", family: Names | None = None) -> Naming:
    """By other names; of experts, matrices that are stacked: [experts, rows, columns]."""
    shapes: dict[str, tuple[int, ...]] = {}
    numbers: dict[str, int] = {}
    for name, shape in naming.shapes.items():
        new, expert = rename(name)
        if expert is None:
            shapes[new] = shape
            continue
        numbers[new] = max(numbers.get(new, 0), expert[0] + 1)
        rows = shape[0] if expert[1] == "all" else 2 * shape[0]
        shapes[new] = (numbers[new], rows, *shape[1:])
    weights = []
    for weight in naming.weights:
        runs = []
        for run in weight.runs:
            new, expert = rename(run.name)
            first = 0
            if expert is not None:
                rows = shapes[new][1]
                first = expert[0] * rows + (rows // 2 if expert[1] == "second" else 0)
            runs.append(dataclasses.replace(run, name=new, start=first + run.start))
        weights.append(dataclasses.replace(weight, runs=tuple(runs)))
    return dataclasses.replace(
        naming,
        label=label or naming.label,
        family=family or naming.family,
        weights=tuple(weights),
        shapes=shapes,
        copies=tuple(rename(name)[0] for name in naming.copies),
        padded={rename(name)[0] for name in naming.padded},
        constants={rename(name)[0]: value for name, value in naming.constants.items()},
    )


@dataclass(slots=True, frozen=True)
class SourceTensor:
    """A tensor that rows are taken from."""

    shape: tuple[int, ...]
    origin: RowRange
    """Where its elements are."""


@dataclass(slots=True, frozen=True)
class MappedOrigin:
    """A tensor made of rows of others. Rows that no run has are 0. Implements ``tensors.RowRange``."""

    dtype: str
    shape: tuple[int, ...]
    runs: tuple[RowRun, ...]
    """By the rows of this tensor, which are ``row``; those of the others are ``start``."""
    sources: Mapping[str, SourceTensor]
    geometry: Geometry = PLAIN
    """Of the others."""
    scatters: int = 0
    """0: ``step`` is between the rows of the others; else between those of this tensor, and the largest is 1 more."""

    def rows_read(self, source: Tensors, rectangle: Rectangle) -> np.ndarray:
        """A rectangle as words of ``dtype``."""
        offset, shape = rectangle
        words = np.zeros(shape, dtype=WORDS[ITEM_BYTES[self.dtype]])
        if not words.size:
            return words
        if len(self.shape) < 2 or self.geometry.vectors:
            first = sum(at * math.prod(self.shape[dim + 1 :]) for dim, at in enumerate(offset))
            flat, columns = words.reshape(-1, 1), (0, 1)
        else:
            lead = (*offset[:-1], 0)
            first = sum(at * math.prod(self.shape[dim + 1 : -1]) for dim, at in enumerate(lead[:-1]))
            flat, columns = words.reshape(-1, shape[-1]), (offset[-1], shape[-1])
        position = max(0, bisect_right(self.runs, first, key=lambda run: run.row) - 1 - self.scatters)
        for run in self.runs[position:]:
            if run.row >= first + len(flat):
                break
            self._fill(source, run, first, columns, flat)
        return words

    def _fill(self, source: Tensors, run: RowRun, first: int, columns: tuple[int, int], flat: np.ndarray) -> None:
        here, there = (run.step, 1) if self.scatters else (1, run.step)
        low = max(0, -(-(first - run.row) // here))
        high = min(run.rows, -(-(first + len(flat) - run.row) // here))
        if low >= high:
            return
        span = 1 + (high - low - 1) * there
        start = run.row + low * here - first
        read = self._read(source, run.name, run.start + low * there, span, columns)
        flat[start : start + 1 + (high - low - 1) * here : here] = read[::there]

    def _read(self, source: Tensors, name: str, first: int, rows: int, columns: tuple[int, int]) -> np.ndarray:
        """Rows of one of the others: [rows, columns]."""
        tensor, geometry = self.sources[name], self.geometry
        core = geometry.core(tensor.shape)
        parts = []
        for expert, at, count in _by_expert(core, geometry, first, rows):
            offset: tuple[int, ...] = (at, columns[0])
            shape: tuple[int, ...] = (count, columns[1])
            if len(core) == 1 or geometry.vectors:
                offset, shape = offset[:1], shape[:1]
            elif geometry.transposed:
                offset, shape = offset[::-1], shape[::-1]
            offset, shape = (*expert, *offset), (*(1 for _ in expert), *shape)
            rectangle = geometry.whole(offset, 0), geometry.whole(shape, 1)
            found = tensor.origin.rows_read(source, rectangle).reshape(shape[len(expert) :])
            parts.append(found.T if geometry.transposed and found.ndim > 1 else found.reshape(count, -1))
        whole = np.ascontiguousarray(np.concatenate(parts) if len(parts) > 1 else parts[0])
        return cast(whole, tensor.origin.dtype, self.dtype)


def _by_expert(
    core: tuple[int, ...], geometry: Geometry, first: int, rows: int
) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Rows by the expert that they are of: its number, the first row among its own, how many."""
    if len(core) < (2 if geometry.vectors else 3):
        yield (), first, rows
        return
    own = core[-1] if geometry.vectors or geometry.transposed else core[1]
    while rows:
        expert, at = divmod(first, own)
        count = min(rows, own - at)
        yield (expert,), at, count
        first, rows = first + count, rows - count
