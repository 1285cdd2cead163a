"""Weights that are made of rows of other tensors, in both directions."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from tools.convert.dtypes import cast
from tools.reshard.named_weights import PLAIN, Geometry, RowRun
from tools.reshard.tensors import Rectangle, RowRange, Tensors
from training.checkpoint.format.pieces import ITEM_BYTES
from training.checkpoint.format.reader import WORDS


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
