"""Our tensors in blocks: what is read, turned and written in one go."""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from models.hf.tables import Entry
from program.errors import UserError
from tools.shared.hf_folder.source import HfFolder
from training.checkpoint.format.pieces import ITEM_BYTES
from training.checkpoint.format.reader import WORDS

BLOCK_BYTES = 64 << 20
"""Of a block at most, unless its tensor is turned: a few copies of it are what a worker needs."""


@dataclass(slots=True, frozen=True)
class RowBlock:
    """Rows of one of our tensors: a piece of the checkpoint."""

    entry: Entry
    dtype: str
    first: int
    rows: int

    @property
    def bytes(self) -> int:
        """Of the piece."""
        return self.rows * self.entry.columns * ITEM_BYTES[self.dtype]

    @property
    def rectangle(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Its offset and shape in the tensor."""
        return self.entry.rectangle(self.first, self.rows)


def blocks(entry: Entry, dtype: str) -> Iterator[RowBlock]:
    """A tensor in blocks of at most BLOCK_BYTES, never over the edge of an expert; whole if its rows are columns."""
    unit = entry.unit
    step = max(1, BLOCK_BYTES // (entry.columns * ITEM_BYTES[dtype]))
    step = unit if entry.turned else min(step, unit)
    for start in range(0, entry.rows, unit):
        for row in range(0, unit, step):
            yield RowBlock(entry, dtype, start + row, min(step, unit - row))


def read_block(block: RowBlock, source: HfFolder, names: dict[str, str]) -> np.ndarray:
    """A block's words, [rows, columns]. Our rows that they do not have are 0."""
    entry, last = block.entry, block.first + block.rows
    words = np.zeros((block.rows, entry.columns), dtype=WORDS[ITEM_BYTES[block.dtype]])
    if entry.all_experts or entry.turned or entry.unsqueezed == 0:
        _fill_turned(words, block, source, names)
        return words
    at = max(0, bisect.bisect_right(entry.strips, block.first, key=lambda strip: strip.row) - 1)
    for strip in entry.strips[at:]:
        if strip.row >= last:
            break
        first, end = max(strip.row, block.first), min(strip.row + strip.rows, last)
        if first < end:
            start = strip.start + first - strip.row
            words[first - block.first : end - block.first] = source.rows(
                names[strip.name], start, end - first, block.dtype
            )
    return words


def _fill_turned(words: np.ndarray, block: RowBlock, source: HfFolder, names: dict[str, str]) -> None:
    """Where our rows are not rows of their file: of one expert, or of all of the tensor."""
    entry, last = block.entry, block.first + block.rows
    unit = block.first // entry.unit
    theirs = {name: _unit_of(entry, unit, source, names[name], block.dtype) for name in entry.their_shapes()}
    for strip in entry.strips:
        first, end = max(strip.row, block.first), min(strip.row + strip.rows, last)
        if first < end:
            rows = theirs[strip.name][
                slice(strip.theirs.start - unit * entry.unit, strip.theirs.stop - unit * entry.unit, strip.step)
            ]
            words[first - block.first : end - block.first] = rows[first - strip.row : end - strip.row]


def _unit_of(entry: Entry, unit: int, source: HfFolder, name: str, dtype: str) -> np.ndarray:
    """One of their tensors, of experts fused one expert's part, with our columns: [rows, columns]."""
    shape = source.places[name].shape
    found = source.rows(name, unit, 1, dtype) if entry.all_experts else source.rows(name, 0, shape[0], dtype)
    return found.reshape(entry.columns, -1).T if entry.transposed else found.reshape(-1, entry.columns)


def entry_dtype(entry: Entry, source: HfFolder, names: dict[str, str], asked: str | None) -> str:
    """Raises UserError where tensors that become one have several dtypes, and none is asked for."""
    found = sorted({source.dtype(names[name]) for name in entry.their_shapes()})
    if asked is not None and not entry.keeps_dtype:
        return asked
    if len(found) > 1:
        raise UserError(f"{entry.name}: made of tensors in {' and '.join(found)}. Choose one: --dtype {found[0]}.")
    return found[0]


def most_frequent_dtype(parts: Sequence[Sequence[RowBlock]]) -> str:
    """By bytes."""
    sizes: dict[str, int] = {}
    for block in (block for part in parts for block in part):
        sizes[block.dtype] = sizes.get(block.dtype, 0) + block.bytes
    return max(sizes, key=lambda dtype: sizes[dtype])
