"""Tensors in blocks of bounded size, and what can be said of their numbers."""

import difflib
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from program.errors import UserError
from tools.inspect_checkpoint.contents import Stored, StoredParameter
from tools.inspect_checkpoint.text import columns, finite, number
from tools.shared.dtypes import to_numbers
from training.checkpoint.format.manifest import DamagedError
from training.checkpoint.format.pieces import ITEM_BYTES
from training.checkpoint.format.reader import WORDS, FileReader

BLOCK_ELEMENTS = 4 << 20
"""Read at once: 32 MiB as fp64, of which a few copies are held."""

_WHOLE = {"int64": np.int64, "int32": np.int32, "int16": np.int16, "int8": np.int8, "uint8": np.uint8, "bool": np.uint8}

Shape = tuple[int, ...]


@dataclass(kw_only=True, slots=True)
class Statistics:
    """Of one tensor; of its finite elements but for the counts. fp64 throughout."""

    elements: int = 0
    min: float = math.inf
    max: float = -math.inf
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squares of the distances from the mean."""
    nan: int = 0
    inf: int = 0
    zeros: int = 0

    @property
    def std(self) -> float:
        """Of the population."""
        finite_ones = self.elements - self.nan - self.inf
        return math.sqrt(self.squares / finite_ones) if finite_ones else math.nan

    @property
    def norm(self) -> float:
        """Euclidean."""
        return math.sqrt(self.squares + (self.elements - self.nan - self.inf) * self.mean**2)

    def add(self, values: np.ndarray) -> None:
        """Take in a block: counts, mean and squares of two sets make those of both (Chan, Golub, LeVeque 1979)."""
        is_nan, is_inf = np.isnan(values), np.isinf(values)
        good = values[~(is_nan | is_inf)].astype(np.float64)
        before = self.elements - self.nan - self.inf
        self.elements, self.zeros = self.elements + values.size, self.zeros + int(np.count_nonzero(values == 0))
        self.nan, self.inf = self.nan + int(is_nan.sum()), self.inf + int(is_inf.sum())
        if not good.size:
            return
        self.min, self.max = min(self.min, float(good.min())), max(self.max, float(good.max()))
        mean = float(good.mean())
        step, total = mean - self.mean, before + good.size
        self.mean += step * good.size / total
        good -= mean
        self.squares += float(np.dot(good, good)) + step * step * before * good.size / total


def statistics(reader: FileReader, stored: Stored) -> Statistics:
    """Of one tensor, read block by block. Raises DamagedError where a file is too short."""
    found = Statistics()
    for offset, shape in rectangles(stored.shape):
        found.add(values(read(reader, stored, offset, shape), stored.dtype).reshape(-1))
    return found


def rectangles(shape: Shape, most: int = BLOCK_ELEMENTS) -> Iterator[tuple[Shape, Shape]]:
    """A tensor cut into rectangles (offset, shape) of at most ``most`` elements, in row-major order."""
    if not shape or math.prod(shape) <= most:
        yield (0,) * len(shape), shape
        return
    row = math.prod(shape[1:])
    if row > most:
        for index in range(shape[0]):
            for offset, size in rectangles(shape[1:], most):
                yield (index, *offset), (1, *size)
        return
    step = most // max(1, row)
    for first in range(0, shape[0], step):
        yield (first, *(0,) * (len(shape) - 1)), (min(step, shape[0] - first), *shape[1:])


def read(reader: FileReader, stored: Stored, offset: Shape, shape: Shape) -> np.ndarray:
    """A rectangle's words. Raises DamagedError where the checkpoint does not hold all of it."""
    words = np.empty(shape, dtype=WORDS[ITEM_BYTES[stored.dtype]])
    try:
        reader.read(stored.key, offset, words)
    except ValueError as error:
        raise DamagedError(str(error)) from None
    return words


def values(words: np.ndarray, dtype: str) -> np.ndarray:
    """Words as numbers that numpy knows."""
    if dtype in _WHOLE:
        return words.view(_WHOLE[dtype])
    if dtype == "float8_e5m2":  # the upper half of an fp16
        return (words.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    return to_numbers(words, dtype)


def matching(found: Sequence[StoredParameter], pattern: str, path: Path) -> list[tuple[str, Stored]]:
    """(name, tensor) of all whose name, or key in the checkpoint, fits. Raises UserError, with near names, for none."""
    fitting = [
        (parameter.name, stored)
        for parameter in found
        for stored in parameter.states.values()
        if fnmatchcase(parameter.name, pattern) or fnmatchcase(stored.key, pattern)
    ]
    if not fitting:
        near = difflib.get_close_matches(pattern, [one.name for one in found], n=3, cutoff=0.4)
        hint = f" Near: {', '.join(near)}." if near else ""
        raise UserError(f'--tensor "{pattern}": no tensor of {path} has such a name.{hint} Use * for any characters.')
    return fitting


def table(found: Sequence[tuple[str, Stored, Statistics]]) -> list[str]:
    """A line for each tensor."""
    head = ("tensor", "state", "dtype", "min", "max", "mean", "std", "norm", "nan", "inf", "zeros")
    rows = [
        (
            name,
            stored.kind,
            stored.dtype,
            *map(number, (one.min, one.max, one.mean, one.std, one.norm)),
            f"{one.nan:,}",
            f"{one.inf:,}",
            f"{one.zeros:,}",
        )
        for name, stored, one in found
    ]
    return columns([head, *rows], right=range(3, 11))


def to_json(name: str, stored: Stored, one: Statistics) -> dict[str, Any]:
    """What ``table`` shows; null for NaN and infinity."""
    exact = {key: finite(value) if isinstance(value, float) else value for key, value in asdict(one).items()}
    del exact["squares"]
    own = {"name": name, "state": stored.kind, "key": stored.key, "dtype": stored.dtype, "shape": list(stored.shape)}
    return {**own, **exact, "std": finite(one.std), "norm": finite(one.norm)}
