"""Pieces of global tensors: where they lie in the tensor, and where their bytes lie in a file."""

import math
from dataclasses import dataclass
from typing import Any

from program.schema import shown

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes of an element, by torch's name of its dtype."""


MOST_BYTES, MOST_DIMS = 1 << 62, 16
"""What no file and no tensor has."""


@dataclass(slots=True, frozen=True)
class TensorPiece:
    """The rectangle at ``offset`` of each tensor of a group: row-major bytes of the first, then of the second, ..."""

    file: str
    position: int
    """Of the first tensor's first byte in the file."""
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    hashes: tuple[str, ...]
    """xxh3_64 of each tensor's bytes, hexadecimal."""


@dataclass(slots=True, frozen=True)
class TensorGroup:
    """Tensors of one dtype and global shape that are cut alike: a weight alone, or the states of its optimizer.

    Cut alike, they need one table: a third of the metadata of an optimizer's three states.
    """

    keys: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]

    def piece_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of one tensor's rectangle of this shape."""
        return math.prod(shape) * ITEM_BYTES[self.dtype]


def piece_entry(piece: TensorPiece) -> list[Any]:
    """As JSON: [file, position, offset, shape, hashes]."""
    return [piece.file, piece.position, list(piece.offset), list(piece.shape), list(piece.hashes)]


def read_piece(entry: Any) -> TensorPiece:
    """Inverse of ``piece_entry``. Raises ValueError, TypeError for anything else.

    Checked by hand: a large checkpoint has hundreds of thousands of pieces.
    """
    file, position, offset, shape, hashes = entry
    numbers = (position, *offset, *shape)
    if not all(type(number) is int and 0 <= number < MOST_BYTES for number in numbers) or len(offset) != len(shape):
        raise ValueError(f"a piece at {shown(position)}, {shown(offset)}, of shape {shown(shape)}")
    if not all(type(text) is str for text in (file, *hashes)):
        raise ValueError(f"a piece in {shown(file)} with hashes {shown(hashes)}")
    return TensorPiece(file, position, tuple(offset), tuple(shape), tuple(hashes))


def read_group(entry: Any) -> TensorGroup:
    """The group of a table's entry, without its pieces. Raises ValueError, TypeError, KeyError for anything else."""
    keys, dtype, shape = entry["keys"], entry["dtype"], entry["shape"]
    if dtype not in ITEM_BYTES:
        raise ValueError(f"dtype {shown(dtype)}")
    if not keys or not all(type(key) is str for key in keys):
        raise ValueError(f"tensors {shown(keys)}")
    return TensorGroup(tuple(keys), dtype, read_shape(shape, dtype))


def read_shape(shape: Any, dtype: str) -> tuple[int, ...]:
    """A tensor's shape. Raises ValueError, TypeError for anything else, and for more bytes than a file can have."""
    if not all(type(size) is int and 0 <= size < MOST_BYTES for size in shape) or len(shape) > MOST_DIMS:
        raise ValueError(f"shape {shown(shape)}")
    if math.prod(shape) * ITEM_BYTES[dtype] >= MOST_BYTES:
        raise ValueError(f"shape {shown(shape)} of {dtype}, {math.prod(shape) * ITEM_BYTES[dtype]:,} bytes")
    return tuple(shape)
