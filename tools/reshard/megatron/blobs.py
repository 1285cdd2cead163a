"""Writes .distcp files: what torch.save makes of each rectangle, one after another, and a table of them."""

import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from program.durable import replace_file
from program.untrusted import read_json
from training.checkpoint.format.pieces import ITEM_BYTES, TensorGroup
from training.checkpoint.format.reader import WORDS
from training.checkpoint.format.writer import TABLE

ENDING = ".distcp"
Chunk = tuple[str, tuple[int, ...], tuple[int, ...], int, int]
"""Key, offset, shape, first byte, bytes."""
TABLE_BYTES = 1 << 30
"""Largest table that is read."""


class BlobWriter:
    """Writes ``folder/name.distcp`` and, when closed, its table. What has no table was not finished.

    A block's bytes are in memory twice while it is written.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / (name + ENDING)
        self._file = self.path.open("wb")
        self._entries: list[list[Any]] = []

    def add(
        self, group: TensorGroup, offset: tuple[int, ...], shape: tuple[int, ...], buffers: Sequence[memoryview]
    ) -> None:
        """Append a chunk of each of the group's tensors. Raises OSError where the disk does not take it."""
        for key, buffer in zip(group.keys, buffers, strict=True):
            start = self._file.tell()
            words = np.frombuffer(buffer, dtype=WORDS[ITEM_BYTES[group.dtype]]).reshape(shape)
            self._file.write(saved(torch.from_numpy(words).view(getattr(torch, group.dtype))))
            self._entries.append([key, list(offset), list(shape), start, self._file.tell() - start])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()
        if kind is None:
            replace_file(self.path.with_suffix(TABLE), json.dumps(self._entries, separators=(",", ":")).encode())


def saved(value: Any) -> bytes:
    """What torch.save makes of a value; the same bytes whenever it is asked."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def read_table(folder: Path, name: str) -> list[Chunk]:
    """The chunks of a part: (key, offset, shape, first byte, bytes)."""
    found: list[Chunk] = read_json(folder / f"{name}{TABLE}", list[Chunk], TABLE_BYTES)
    return found
