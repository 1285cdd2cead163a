"""Rows of other tensors by rectangle, and stretches of flat memory as rectangles: any of them, against numpy."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tools.reshard.assembled import AssembledFiles, assembled, rectangles_of_range
from tools.reshard.named_weights import MappedOrigin, RowRun, SourceTensor
from tools.reshard.tensors import Rectangle
from tools.reshard.torch_file import TorchFile

HEADS, CHANNELS, COLUMNS = 3, 6, 4
OURS = np.arange(HEADS * CHANNELS * COLUMNS, dtype=np.uint32).reshape(-1, COLUMNS)
THEIRS = OURS.reshape(HEADS, 2, CHANNELS // 2, COLUMNS).transpose(0, 2, 1, 3).reshape(OURS.shape)
"""Halves of a head's channels take turns."""


class Held:
    """A tensor in memory. Implements ``tensors.SourceRows``."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape, self.dtype = array, array.shape, "float32"

    def rows_read(self, _: Any, rectangle: Rectangle) -> np.ndarray:
        inside = tuple(slice(at, at + size) for at, size in zip(*rectangle, strict=True))
        assert self.array[inside].shape == rectangle[1]  # nothing beyond it is asked for
        return self.array[inside]


def runs(*, inverse: bool) -> tuple[RowRun, ...]:
    half, found = CHANNELS // 2, []
    for head, part in itertools.product(range(HEADS), (0, 1)):
        first = head * CHANNELS
        here, there = first + part * half, first + part
        found.append(RowRun("x", *((here, there) if inverse else (there, here)), half, step=2))
    return tuple(sorted(found, key=lambda run: run.row))


@pytest.mark.parametrize("inverse", [False, True])
def test_rows_that_take_turns(inverse: bool) -> None:
    source, wanted = (OURS, THEIRS) if inverse else (THEIRS, OURS)
    sources = {"x": SourceTensor(source.shape, Held(source))}
    origin = MappedOrigin("float32", source.shape, runs(inverse=inverse), sources, scatters=inverse)
    for first, last in itertools.combinations(range(len(wanted) + 1), 2):
        for left, right in ((0, COLUMNS), (1, 3)):
            found = origin.rows_read(None, ((first, left), (last - first, right - left)))  # type: ignore[arg-type]
            assert np.array_equal(found, wanted[first:last, left:right]), (first, last)


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4), (1, 6)])
def test_a_stretch_of_memory_is_rectangles(shape: tuple[int, ...]) -> None:
    size = math.prod(shape)
    for start, stop in itertools.combinations(range(size + 1), 2):
        held = np.full(shape, -1)
        for first, (offset, extent) in rectangles_of_range(shape, start, stop):
            inside = tuple(slice(at, at + length) for at, length in zip(offset, extent, strict=True))
            assert (held[inside] == -1).all()
            held[inside] = np.arange(first, first + math.prod(extent)).reshape(extent)
        expected = np.where((np.arange(size) >= start) & (np.arange(size) < stop), np.arange(size), -1)
        assert np.array_equal(held.reshape(-1), expected)


def test_views_of_one_storage(tmp_path: Path) -> None:
    """As parameters of a flat buffer are saved: parts, transposed ones, every other row."""
    buffer = torch.arange(120, dtype=torch.float32)
    views = {
        "part": buffer[7:31].view(4, 6), "turned": buffer[:24].view(6, 4).T, "steps": buffer.view(12, 10)[1::3],
        "one": buffer[5], "cube": buffer.view(4, 5, 6)[:, 1:4],
    }  # fmt: skip
    torch.save(views, tmp_path / "x.pt")
    saved = TorchFile(tmp_path, "x.pt").value
    tensors = {
        key: assembled(key, view.shape, [((0,) * len(view.shape), view)], tmp_path) for key, view in saved.items()
    }
    files = AssembledFiles(tmp_path, tensors, ("x.pt",))
    for key, view in views.items():
        ranges = (itertools.combinations(range(size + 1), 2) for size in view.shape)
        for bounds in itertools.product(*ranges):
            wanted = view[tuple(slice(*each) for each in bounds)].contiguous().numpy()
            found = np.empty(wanted.shape, dtype=np.uint32)
            files.read(key, tuple(first for first, _ in bounds), found)
            assert np.array_equal(found.view(np.float32), wanted), (key, bounds)
    files.close()
