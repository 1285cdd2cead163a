"""Boxes to files and back: between this rank's tensors and the words of ``training.checkpoint.format``."""

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from parallel.regions import Box
from training.checkpoint import room
from training.checkpoint.format.pieces import TensorGroup
from training.checkpoint.format.reader import FileReader as FileReader
from training.checkpoint.format.writer import DATA, FileWriter

__all__ = ["TensorReader", "file_name", "grouped", "write"]

MOST_THREADS, LARGE_BYTES = 2, 1 << 20
"""Threads that read a rank's large boxes, where the machine has as many cores for it (`make bench-checkpoint`)."""
_WORDS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
_STATE = re.compile(r"^optimizer\.state\.\w+\.")


def file_name(rank: int) -> str:
    """Of the file that a rank writes, without its ending."""
    return f"rank_{rank:05d}"


def write(folder: Path, boxes: Sequence[Box], rank: int) -> int:
    """Write this rank's boxes into a file of its own: bytes written. No communication.

    Straight from the tensors' memory; from a GPU, a box at a time passes through the host. Raises OSError where the
    disk does not take them.
    """
    needed = sum(box.data.nbytes for box in boxes if box.writes)
    with (
        room.explain_full_disk(folder / f"{file_name(rank)}{DATA}", needed),
        FileWriter(folder, file_name(rank)) as file,
    ):
        for group, alike in grouped(boxes):
            host = [box.data.detach().to("cpu", copy=False).contiguous() for box in alike]
            file.add(group, alike[0].offset, tuple(alike[0].data.shape), [_bytes(tensor) for tensor in host])
        return file.written_bytes


def grouped(boxes: Sequence[Box]) -> Iterator[tuple[TensorGroup, list[Box]]]:
    """The boxes that this rank writes; the states of one slice of an optimizer together, which are cut alike."""
    alike: dict[tuple[object, ...], list[Box]] = {}
    for box in boxes:
        if box.writes:
            name = _STATE.sub("optimizer.state.*.", box.key)
            alike.setdefault((name, box.offset, tuple(box.data.shape), box.data.dtype), []).append(box)
    for found in alike.values():
        dtype = str(found[0].data.dtype).removeprefix("torch.")
        yield TensorGroup(tuple(box.key for box in found), dtype, found[0].global_shape), found


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


class TensorReader:
    """A checkpoint's tensors, read into this rank's memory. Close it, or use it as a context."""

    def __init__(self, folder: Path, ranks_here: int = 1) -> None:
        """ranks_here: how many read at once on this machine."""
        self.files = FileReader(folder)
        self._threads = max(1, min(MOST_THREADS, (os.cpu_count() or 1) // ranks_here))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Key -> global shape of every tensor."""
        return {key: info.shape for key, info in self.files.tensors.items()}

    def read(self, boxes: Sequence[Box]) -> None:
        """Fill the boxes' memory, converting to its dtype. No communication.

        Straight into it where it is host memory of the saved dtype; else by way of a copy of one box. Large boxes by
        several threads, which end with this: copying from the page cache costs more than finding the bytes there.
        """
        large = [box for box in boxes if box.data.nbytes >= LARGE_BYTES]
        _read_boxes(self.files, [box for box in boxes if box.data.nbytes < LARGE_BYTES])
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(self.files.beside()) for _ in range(self._threads)]
            pool = stack.enter_context(ThreadPoolExecutor(self._threads))  # ended before the files are closed
            work = zip(files, shares(large, self._threads), strict=True)
            for done in [pool.submit(_read_boxes, own, share) for own, share in work]:
                done.result()

    def read_into(self, key: str, offset: tuple[int, ...], data: Tensor) -> None:
        """Fill ``data`` with the rectangle at ``offset`` of the tensor ``key``."""
        _read_into(self.files, key, offset, data)

    def close(self) -> None:
        """Close the files."""
        self.files.close()

    def __enter__(self) -> "TensorReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@torch.no_grad()  # a thread's own setting
def _read_boxes(files: FileReader, boxes: Sequence[Box]) -> None:
    for box in boxes:
        _read_into(files, box.key, box.offset, box.data)


def _read_into(files: FileReader, key: str, offset: tuple[int, ...], data: Tensor) -> None:
    saved: torch.dtype = getattr(torch, files.tensors[key].dtype)
    direct = data.dtype == saved and data.device.type == "cpu" and data.is_contiguous()
    host = data.detach() if direct else torch.empty(data.shape, dtype=saved)
    files.read(key, offset, _words(host))
    if not direct:
        data.copy_(host)


def shares(boxes: Sequence[Box], count: int) -> list[list[Box]]:
    """As even as can be, each in the order of the boxes, which is that of the file."""
    total, before, found = sum(box.data.nbytes for box in boxes), 0, [list[Box]() for _ in range(count)]
    for box in boxes:
        found[before * count // total].append(box)
        before += box.data.nbytes
    return found


def _words(tensor: Tensor) -> np.ndarray:
    """The tensor's own memory as unsigned words of its elements' size."""
    return tensor.view(_WORDS[tensor.element_size()]).numpy()
