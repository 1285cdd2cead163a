"""Which tensors a checkpoint has, and in which pieces they lie. Neither torch nor numpy here."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from program.schema import shown
from program.untrusted import InputError, json_value, read_bytes
from training.checkpoint.format.descriptors import Descriptors
from training.checkpoint.format.manifest import DamagedError
from training.checkpoint.format.pieces import ITEM_BYTES, TensorPiece, read_piece, read_shape
from training.checkpoint.format.tables import INDEX, INDEX_BYTES, PIECES


@dataclass(slots=True, frozen=True)
class TensorInfo:
    """One tensor of a checkpoint."""

    dtype: str
    shape: tuple[int, ...]
    line: tuple[int, int]
    """Its line in pieces.jsonl: position and length in bytes."""
    number: int
    """Which of its group's tensors it is."""

    def piece_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a rectangle of this shape."""
        return math.prod(shape) * ITEM_BYTES[self.dtype]


def _read_info(entry: Any) -> TensorInfo:
    """Of an index's entry. Raises ValueError, TypeError, KeyError, IndexError for anything else."""
    dtype, (position, length, number) = entry["dtype"], entry["pieces"]
    if dtype not in ITEM_BYTES:
        raise ValueError(f"dtype {shown(dtype)}")
    if not all(type(one) is int and 0 <= one < INDEX_BYTES for one in (position, length, number)):
        raise ValueError(f"pieces at {shown(entry['pieces'])}")
    return TensorInfo(dtype, read_shape(entry["shape"], dtype), (position, length), number)


class CheckpointIndex:
    """The tables of a checkpoint, read when they are first asked for. Close it, or use it as a context."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._descriptors = Descriptors(folder)
        self._lines: dict[tuple[int, int], list[TensorPiece]] = {}

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor. Raises DamagedError where the index cannot be read."""
        path = self.folder / INDEX
        try:
            entries = json_value(read_bytes(path, INDEX_BYTES), path)["tensors"]
            return {key: _read_info(entry) for key, entry in entries.items()}
        except (OSError, InputError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise DamagedError(f"{path}: not the index of a checkpoint ({error})") from None

    def pieces(self, key: str) -> list[TensorPiece]:
        """Where the tensor lies."""
        info = self.tensors[key]
        if info.line not in self._lines:
            try:
                line = os.pread(self._descriptor(PIECES), info.line[1], info.line[0])
                self._lines[info.line] = [read_piece(entry) for entry in json_value(line, PIECES)]
            except (OSError, InputError, ValueError, TypeError) as error:
                raise DamagedError(f"{self.folder / PIECES}: the pieces of {key} cannot be read ({error})") from None
        return self._lines[info.line]

    def close(self) -> None:
        """Close the files."""
        self._descriptors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _descriptor(self, name: str) -> int:
        try:
            return self._descriptors.get(name)
        except (ValueError, InputError) as error:
            raise DamagedError(f"{self.folder}: a piece lies in {error}") from None
        except OSError as error:
            raise DamagedError(f"{self.folder / name}: {error.strerror}") from None
