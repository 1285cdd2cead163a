"""One writer's file: the bytes of its pieces as they come, hashed on their way, and a table of them.

The table also ends the file itself, before 8 bytes with its length. So a file is read once to be verified: its hash in
the manifest is that of the table, and the table has those of the pieces.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import xxhash

from program.durable import replace_file
from training.checkpoint.format.pieces import TensorGroup, TensorPiece, piece_entry

DATA = ".bin"
"""Ending of a file of tensors."""

TABLE = ".pieces.json"
"""Ending of the table beside a data file, until the commit puts all tables together."""

LENGTH_BYTES = 8
"""At the end of a file of tensors, little-endian: the bytes of the table before it."""

CHUNK_BYTES = 256 << 10  # what is hashed and then written: still in the core's own cache when it is written

START_BYTES = 8 << 20  # written out at a time


class WriteBack:
    """Has the disk begin with a growing file, so that it works while the next bytes are made, not only at fsync.

    Linux begins to write back what is said not to be needed, and drops only what is on the disk already
    (posix_fadvise(2), POSIX_FADV_DONTNEED).
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._begun = descriptor, 0

    def reached(self, size: int) -> None:
        """The file has ``size`` bytes now."""
        if size - self._begun >= START_BYTES:
            os.posix_fadvise(self._descriptor, self._begun, size - self._begun, os.POSIX_FADV_DONTNEED)
            self._begun = size


class FileWriter:
    """Writes ``folder/name.bin`` and, when closed, its table. What has no table was not finished."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / f"{name}{DATA}"
        self._file = self.path.open("wb", buffering=0)
        self._position = 0
        self._disk = WriteBack(self._file.fileno())
        self._groups: dict[TensorGroup, list[TensorPiece]] = {}

    @property
    def written_bytes(self) -> int:
        """Bytes of pieces written so far."""
        return self._position

    def add(
        self, group: TensorGroup, offset: tuple[int, ...], shape: tuple[int, ...], buffers: Sequence[memoryview]
    ) -> None:
        """Append a piece. ``buffers``: the row-major bytes of the rectangle in each of the group's tensors, in order.

        Raises ValueError where their sizes are not what dtype and shape say, OSError where the disk does not take them.
        """
        expected = group.piece_bytes(shape)
        if len(buffers) != len(group.keys) or any(buffer.nbytes != expected for buffer in buffers):
            found = [buffer.nbytes for buffer in buffers]
            raise ValueError(f"{group.keys}: a piece of shape {shape} has {expected} bytes for each, found {found}")
        position = self._position
        hashes = tuple(self._append(buffer.cast("B")) for buffer in buffers)
        self._groups.setdefault(group, []).append(
            TensorPiece(self.path.name, position, tuple(offset), tuple(shape), hashes)
        )

    def close(self) -> None:
        """Make the file durable, then say what is in it."""
        groups = [
            {
                "keys": group.keys,
                "dtype": group.dtype,
                "shape": group.shape,
                "pieces": [piece_entry(piece) for piece in pieces],
            }
            for group, pieces in self._groups.items()
        ]
        end = json.dumps({"file": self.path.name, "groups": groups}, separators=(",", ":")).encode()
        self._write(memoryview(end + len(end).to_bytes(LENGTH_BYTES, "little")))
        os.fsync(self._file.fileno())
        self._file.close()
        size = self._position + len(end) + LENGTH_BYTES
        table = {"file": self.path.name, "bytes": size, "hash": xxhash.xxh3_128(end).hexdigest(), "groups": groups}
        replace_file(self.path.with_suffix(TABLE), json.dumps(table, separators=(",", ":")).encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()

    def _append(self, data: memoryview) -> str:
        """Write and hash; returns the hash of ``data`` alone."""
        own = xxhash.xxh3_64()
        for start in range(0, data.nbytes, CHUNK_BYTES):
            part = data[start : start + CHUNK_BYTES]
            own.update(part)
            self._write(part)
            self._position += part.nbytes
            self._disk.reached(self._position)
        return own.hexdigest()

    def _write(self, data: memoryview) -> None:
        while data.nbytes:  # a raw file may take less than it is given
            data = data[self._file.write(data) or 0 :]
