"""Weights that are made of rows of other tensors: ours of theirs, and theirs of ours."""

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tools.convert.dtypes import cast
from tools.reshard.naming import RowRun
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
    transposed: bool = False
    """Others are [columns, rows]."""
    scatters: bool = False
    """``step`` is between the rows of this tensor, not between the others'."""

    def rows_read(self, source: Tensors, rectangle: Rectangle) -> np.ndarray:
        """A rectangle as words of ``dtype``."""
        offset, shape = rectangle
        words = np.zeros(shape, dtype=WORDS[ITEM_BYTES[self.dtype]])
        if not words.size:
            return words
        if len(self.shape) < 2:
            flat, first, columns = words.reshape(-1, 1), offset[0] if offset else 0, (0, 1)
        else:
            lead = (*offset[:-1], 0)
            first = sum(at * math.prod(self.shape[dim + 1 : -1]) for dim, at in enumerate(lead[:-1]))
            flat, columns = words.reshape(-1, shape[-1]), (offset[-1], shape[-1])
        position = max(0, bisect_right(self.runs, first, key=lambda run: run.row) - (2 if self.scatters else 1))
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
        """Rows of one of the others."""
        tensor = self.sources[name]
        at, width = columns
        if len(tensor.shape) < 2:
            found = tensor.origin.rows_read(source, ((first,), (rows,))).reshape(-1, 1)
        elif self.transposed:
            found = tensor.origin.rows_read(source, ((at, first), (width, rows))).T
        elif len(tensor.shape) == 2:
            found = tensor.origin.rows_read(source, ((first, at), (rows, width)))
        else:
            parts = []
            while rows:
                index, within = divmod(first, tensor.shape[1])
                count = min(rows, tensor.shape[1] - within)
                parts.append(tensor.origin.rows_read(source, ((index, within, at), (1, count, width)))[0])
                first, rows = first + count, rows - count
            found = np.concatenate(parts)
        return cast(np.ascontiguousarray(found), tensor.origin.dtype, self.dtype)
