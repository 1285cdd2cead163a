"""Reads rectangles of global tensors from a checkpoint, whatever layout wrote its pieces."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import numpy as np

from training.checkpoint.format.index import CheckpointIndex, TensorInfo
from training.checkpoint.format.manifest import DamagedError
from training.checkpoint.format.pieces import ITEM_BYTES, TensorPiece

WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Elements travel as words of their size: numpy knows neither bfloat16 nor fp8."""

AHEAD_BYTES, ASKED_BYTES = 64 << 20, 1 << 20
"""What ``asked_ahead`` keeps asked for, and what is asked for at once: Linux cuts longer requests short
(mm/readahead.c, force_page_cache_ra)."""

SEGMENT_BYTES = 4 << 10
"""A run of wanted bytes shorter than this, a page, is read together with what lies between it and the next: the disk
reads pages. Longer ones are read alone, so that a rank reads little more than its share, however a matrix is cut."""

ROWS_BYTES = 1 << 20
"""Rows that are read whole are so many at a time."""


class FileReader(CheckpointIndex):
    """A checkpoint's tensors by key. Close it, or use it as a context: it keeps files open."""

    def beside(self) -> Self:
        """Another reader of the same folder, for another thread: with files of its own, and this one's index."""
        other = type(self)(self.folder)
        other.__dict__["tensors"] = self.tensors
        return other

    def read(self, key: str, offset: tuple[int, ...], into: np.ndarray) -> None:
        """Fill ``into``, words of the dtype's size (see WORDS), with the rectangle at ``offset`` of its shape.

        Straight into its memory where whole rows of it lie together in the file. Raises DamagedError where a file is
        too short, and ValueError where the rectangle is not within the tensor or the checkpoint does not hold all
        of it.
        """
        info = self.tensors[key]
        if into.dtype.itemsize != ITEM_BYTES[info.dtype]:
            raise ValueError(f"{key} is {info.dtype}; found words of {into.dtype.itemsize} bytes to read it into")
        filled = 0
        for piece, inside, outside in overlaps(self.pieces(key), offset, into.shape):
            target = into[outside]
            self._read_overlap(info, piece, inside, target)
            filled += target.size
        if filled != into.size:
            raise ValueError(
                f"{self.folder}: {key} {list(info.shape)} holds {filled:,} of the {into.size:,} elements at "
                f"{list(offset)}, {list(into.shape)}"
            )

    def ask_for(self, key: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> None:
        """Have the disk fetch the rows that ``read`` of this rectangle will want. Returns at once."""
        info = self.tensors[key]
        for piece, inside, _ in overlaps(self.pieces(key), offset, shape):
            size = info.piece_bytes(piece.shape)
            first, rows = (inside[0].start, inside[0].stop - inside[0].start) if shape else (0, 1)
            row = size // piece.shape[0] if shape else size
            start = piece.position + info.number * size + first * row
            for at in range(start, start + rows * row, ASKED_BYTES):
                os.posix_fadvise(self._descriptor(piece.file), at, ASKED_BYTES, os.POSIX_FADV_WILLNEED)

    def whole(self, key: str) -> np.ndarray:
        """All of a tensor, as words."""
        info = self.tensors[key]
        into = np.empty(info.shape, dtype=WORDS[ITEM_BYTES[info.dtype]])
        self.read(key, (0,) * len(info.shape), into)
        return into

    def _read_overlap(
        self, info: TensorInfo, piece: TensorPiece, inside: tuple[slice, ...], target: np.ndarray
    ) -> None:
        """The part ``inside`` of a piece into ``target``: dim by dim, until what is wanted lies in one run."""
        item, start = ITEM_BYTES[info.dtype], piece.position + info.number * info.piece_bytes(piece.shape)
        self._read_dims(piece.file, start, item, piece.shape, inside, target)

    def _read_dims(
        self, file: str, start: int, item: int, shape: tuple[int, ...], inside: tuple[slice, ...], target: np.ndarray
    ) -> None:
        if not shape:
            self._read_at(file, start, target)
            return
        row = math.prod(shape[1:])
        whole = all(part.start == 0 and part.stop == size for part, size in zip(inside[1:], shape[1:], strict=True))
        first, last = inside[0].start, inside[0].stop
        if whole:
            self._read_at(file, start + first * row * item, target)
        elif target[0].size * item >= SEGMENT_BYTES or (len(shape) > 2 and row * item > SEGMENT_BYTES):
            for number in range(first, last):
                at = start + number * row * item
                self._read_dims(file, at, item, shape[1:], inside[1:], target[number - first])
        else:  # short runs: rows are read whole, a few at a time, and cut in memory
            step = max(1, ROWS_BYTES // max(1, row * item))
            for number in range(first, last, step):
                count = min(step, last - number)
                rows = np.empty((count, *shape[1:]), dtype=target.dtype)
                self._read_at(file, start + number * row * item, rows)
                target[number - first : number - first + count] = rows[(slice(None), *inside[1:])]

    def _read_at(self, file: str, position: int, target: np.ndarray) -> None:
        if (end := read_words(self._descriptor(file), position, target)) is not None:
            raise DamagedError(f"{self.folder / file}: ends at byte {end:,}, where a tensor goes on")


def read_words(descriptor: int, position: int, into: np.ndarray) -> int | None:
    """Fill an array with a file's bytes from ``position`` on: None, or where the file ends before."""
    direct = into if into.flags.c_contiguous else np.empty(into.shape, dtype=into.dtype)
    view = memoryview(direct.reshape(-1).view(np.uint8))
    while view.nbytes:
        if not (count := os.preadv(descriptor, [view], position)):
            return position
        view, position = view[count:], position + count
    if direct is not into:
        into[...] = direct
    return None


def asked_ahead[T](items: Sequence[T], size: Callable[[T], int], ask: Callable[[T], None]) -> Iterator[T]:
    """The items, while the disk is asked for the next AHEAD_BYTES of them: they lie in the files in another order."""
    ahead, following = 0, iter(items)
    for item in items:
        while ahead < AHEAD_BYTES and (next_one := next(following, None)) is not None:
            ask(next_one)
            ahead += size(next_one)
        yield item
        ahead -= size(item)


def overlaps(
    pieces: list[TensorPiece], offset: tuple[int, ...], shape: tuple[int, ...]
) -> Iterator[tuple[TensorPiece, tuple[slice, ...], tuple[Any, ...]]]:
    """Pieces that share elements with a rectangle: these as slices of the piece, and of the rectangle."""
    for piece in pieces:
        inside, outside = [], []
        for at, size, start, length in zip(piece.offset, piece.shape, offset, shape, strict=True):
            low, high = max(at, start), min(at + size, start + length)
            if low >= high:
                break
            inside.append(slice(low - at, high - at))
            outside.append(slice(low - start, high - start))
        else:
            yield piece, tuple(inside), (*outside, ...)  # with the ellipsis, numpy gives a view of 0-d arrays too
