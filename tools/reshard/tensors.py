"""Tensors to write, and where each of their elements comes from."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tools.shared.dtypes import cast
from training.checkpoint.format.pieces import ITEM_BYTES
from training.checkpoint.format.reader import WORDS

BLOCK_BYTES = 64 << 20
"""Of what is read, turned and written in one go; a few copies of it are what a worker needs."""

Rectangle = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape."""


class Info(Protocol):
    """One tensor of a source."""

    @property
    def dtype(self) -> str:
        """Torch's name."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Global."""


class Tensors(Protocol):
    """Files with tensors in them, by the keys that they have there: ``format.reader.FileReader`` is one."""

    @property
    def tensors(self) -> Mapping[str, Info]:
        """Every tensor."""

    def read(self, key: str, offset: tuple[int, ...], into: np.ndarray) -> None:
        """Fill ``into``, words of the dtype's size, with the rectangle at ``offset`` of its shape."""

    def close(self) -> None:
        """Close the files."""


class RowRange(Protocol):
    """Where a tensor comes from."""

    @property
    def dtype(self) -> str:
        """Torch's name."""

    def rows_read(self, source: Tensors, rectangle: Rectangle) -> np.ndarray:
        """A rectangle as words of ``dtype``."""


class SourceRows(RowRange, Protocol):
    """One whole tensor of a source."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows of dim 0 beyond it are 0."""


@dataclass(slots=True, frozen=True)
class Origin:
    """Where a tensor lies in a source: whole, or as one index of the first dim of a stack of layers."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    """Without the stack's dim."""
    index: int | None = None

    def rows_read(self, source: Tensors, rectangle: Rectangle) -> np.ndarray:
        """A rectangle as words of ``dtype``. Rows (of dim 0) that the source does not have are 0."""
        offset, shape = rectangle
        words = np.zeros(shape, dtype=WORDS[ITEM_BYTES[self.dtype]])
        held = words
        if self.shape:
            held = words[: max(0, min(shape[0], self.shape[0] - offset[0]))]
        if held.size and self.index is None:
            source.read(self.key, offset, held)
        elif held.size:
            source.read(self.key, (self.index or 0, *offset), held[None])
        return words


@dataclass(slots=True, frozen=True)
class TargetTensor:
    """One tensor to write."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    origins: tuple[RowRange, ...]
    """One; or, of a stack of layers, one for each index of its first dim."""
    stacked: bool = False

    @property
    def bytes(self) -> int:
        """Of all of it."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def words(self, source: Tensors, rectangle: Rectangle) -> np.ndarray:
        """A rectangle of it, which does not cross layers of a stack."""
        if not self.stacked:
            (origin,) = self.origins
            return cast(origin.rows_read(source, rectangle), origin.dtype, self.dtype)
        (layer, *offset), (_, *shape) = rectangle
        origin = self.origins[layer]
        return cast(origin.rows_read(source, (tuple(offset), tuple(shape))), origin.dtype, self.dtype)[None]


@dataclass(slots=True, frozen=True)
class TensorBlock:
    """A rectangle of tensors that are cut alike: what is read and written in one go."""

    targets: tuple[TargetTensor, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Of all its tensors."""
        return sum(math.prod(self.shape) * ITEM_BYTES[target.dtype] for target in self.targets)


def blocks(targets: tuple[TargetTensor, ...], limit: int = BLOCK_BYTES) -> Iterator[TensorBlock]:
    """Tensors that are cut alike in blocks of at most ``limit`` bytes, or of one row; none crosses layers."""
    first = targets[0]
    item = ITEM_BYTES[first.dtype] * len(targets)
    for offset, shape in rectangles(first.shape, item, limit, apart=int(first.stacked)):
        yield TensorBlock(targets, offset, shape)


def rectangles(shape: tuple[int, ...], item: int, limit: int, apart: int = 0) -> Iterator[Rectangle]:
    """A tensor in rectangles of at most ``limit`` bytes where that can be, contiguous in memory, in order.

    item: bytes of an element. apart: leading dims of which no rectangle holds more than one index.
    """
    if not shape:
        yield (), ()
        return
    rest, row = (0,) * (len(shape) - 1), max(1, item * math.prod(shape[1:]))
    if len(shape) > 1 and (apart or row > limit):
        for index in range(shape[0]):
            for offset, size in rectangles(shape[1:], item, limit, max(0, apart - 1)):
                yield (index, *offset), (1, *size)
        return
    step = 1 if apart else max(1, limit // row)
    for first in range(0, shape[0], step):
        yield (first, *rest), (min(step, shape[0] - first), *shape[1:])
