"""Tensors that lie in pieces in several files of torch.save's, put together: by rectangle, as they are asked for."""

import itertools
import math
import os
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from program.errors import UserError
from program.untrusted import regular_descriptor
from tools.reshard.tensors import Rectangle
from tools.reshard.torch_file import StridedView, TorchFile, damaged_storages, read_view
from training.checkpoint.format.coverage import covered_once

AT_ONCE = 128
"""Files that are open at most."""


@dataclass(slots=True, frozen=True)
class AssembledTensor:
    """One tensor: rectangles of it, each with its offset, which hold each element once."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[tuple[int, ...], StridedView], ...]


def assembled(
    key: str, shape: tuple[int, ...], pieces: Sequence[tuple[tuple[int, ...], StridedView]], folder: Path
) -> AssembledTensor:
    """Raises UserError where the pieces do not hold each element once, or differ in dtype."""
    dtypes = sorted({view.dtype for _, view in pieces})
    if len(dtypes) != 1:
        raise UserError(f"{folder}: the files hold {key} as {' and '.join(dtypes) or 'nothing'}.")
    if not covered_once(shape, ((offset, view.shape) for offset, view in pieces)):
        raise UserError(
            f"{folder}: the files' parts of {key} do not hold each element of {list(shape)} once. Bring back the "
            "files that are missing, or mend the recipe."
        )
    return AssembledTensor(dtypes[0], shape, tuple(sorted(pieces, key=lambda piece: piece[0])))


@dataclass
class AssembledFiles:
    """Implements ``tensors.Tensors``. Close it: it keeps files open."""

    folder: Path
    tensors: Mapping[str, AssembledTensor]
    files: Collection[str]
    """Names within the folder."""
    _open: dict[str, int] = field(default_factory=dict)

    def read(self, key: str, offset: tuple[int, ...], into: np.ndarray) -> None:
        """Fill ``into``, words of the dtype's size, with the rectangle at ``offset`` of its shape."""
        pieces = self.tensors[key].pieces
        first, last = 0, len(pieces)
        if offset and len(pieces) > 8:  # sorted: those that begin behind the rectangle are not looked at
            last = bisect_right(pieces, offset[0] + into.shape[0] - 1, key=lambda piece: piece[0][0])
        for at, view in itertools.islice(pieces, first, last):
            box = _shared((at, view.shape), (offset, into.shape))
            if box is not None:
                start, size = box
                part = view.part(tuple(a - b for a, b in zip(start, at, strict=True)), size)
                inside: list[Any] = [slice(a - b, a - b + n) for a, b, n in zip(start, offset, size, strict=True)]
                read_view(self._descriptor(view.file), part, into[(*inside, ...)], str(self.folder / view.file))

    def fingerprint(self) -> list[list[object]]:
        """What tells one state of the folder from another without reading tensors: [name, bytes, changed]."""
        stats = [(name, (self.folder / name).stat()) for name in sorted(self.files)]
        return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]

    def check(self) -> None:
        """Read every byte once and compare with torch.save's own checksums. Raises UserError with what differs."""
        for name in sorted(self.files):
            if found := damaged_storages(self._descriptor(name), TorchFile(self.folder, name).storages):
                raise UserError(
                    f"{self.folder / name} is damaged: {len(found)} of its storages do not have the checksum that "
                    "torch.save has written. Copy it again."
                )

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def _descriptor(self, name: str) -> int:
        if name not in self._open:
            if len(self._open) >= AT_ONCE:
                self.close()
            self._open[name] = regular_descriptor(self.folder / name)
        return self._open[name]


def _shared(first: Rectangle, second: Rectangle) -> Rectangle | None:
    """What two rectangles have in common."""
    low = tuple(map(max, first[0], second[0]))
    high = tuple(min(a + n, b + m) for a, n, b, m in zip(first[0], first[1], second[0], second[1], strict=True))
    if any(stop <= start for start, stop in zip(low, high, strict=True)):
        return None
    return low, tuple(stop - start for start, stop in zip(low, high, strict=True))


def rectangles_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, Rectangle]]:
    """Elements [start, stop) of a tensor, row by row, as rectangles in order, each with its first element's number."""
    if start >= stop:
        return
    if not shape:
        yield 0, ((), ())
        return
    row = math.prod(shape[1:])
    while start < stop:
        index, within = divmod(start, row)
        whole = (stop - start) // row if not within else 0
        if whole:
            yield start, ((index, *(0 for _ in shape[1:])), (whole, *shape[1:]))
            start += whole * row
            continue
        end = min(row, within + stop - start)
        for number, (offset, size) in rectangles_of_range(shape[1:], within, end):
            yield index * row + number, ((index, *offset), (1, *size))
        start += end - within
