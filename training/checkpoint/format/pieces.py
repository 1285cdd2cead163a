"""Pieces of global tensors: where they lie in the tensor, and where their bytes lie in a file. No torch here."""

import math
from dataclasses import dataclass
from typing import Any

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes of an element, by torch's name of its dtype."""


@dataclass(slots=True, frozen=True)
class Piece:
    """The rectangle at ``offset`` of each tensor of a group: row-major bytes of the first, then of the second, ..."""

    file: str
    position: int
    """Of the first tensor's first byte in the file."""
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    hashes: tuple[str, ...]
    """xxh3_64 of each tensor's bytes, hexadecimal."""


@dataclass(slots=True, frozen=True)
class Group:
    """Tensors of one dtype and global shape that are cut alike: a weight alone, or the states of its optimizer.

    Cut alike, they need one table: a third of the metadata of an optimizer's three states.
    """

    keys: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]

    def piece_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of one tensor's rectangle of this shape."""
        return math.prod(shape) * ITEM_BYTES[self.dtype]


def piece_entry(piece: Piece) -> list[Any]:
    """As JSON: [file, position, offset, shape, hashes]."""
    return [piece.file, piece.position, list(piece.offset), list(piece.shape), list(piece.hashes)]


def read_piece(entry: Any) -> Piece:
    """Inverse of ``piece_entry``. Raises ValueError, TypeError for anything else."""
    file, position, offset, shape, hashes = entry
    return Piece(str(file), int(position), tuple(map(int, offset)), tuple(map(int, shape)), tuple(map(str, hashes)))
