"""What stands on this machine for an object in a bucket: the mark beside it, and how tokens are read through it."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import numpy as np

from data.block_cache import BLOCK_BYTES, BlockCache, CachedObject
from program.buckets.client import ObjectFacts
from program.durable import replace_file
from program.errors import UserError
from program.untrusted import InputError, read_json


def mark_path(path: Path) -> Path:
    """`.X.bin.object` beside `X.bin`."""
    return path.with_name(f".{path.name}.object")


def mark(path: Path, of: ObjectFacts) -> None:
    """Say which object ``path`` stands for."""
    replace_file(mark_path(path), json.dumps(asdict(of)).encode(), suffix=f".{os.getpid()}", durable=False)


def marked(path: Path) -> ObjectFacts | None:
    """The object that ``path`` stands for; None for a file of its own, and where it is not there as marked."""
    try:
        found: ObjectFacts = read_json(mark_path(path), ObjectFacts)
        return found if path.stat().st_size == found.size else None
    except (OSError, InputError):
        return None


class BlockTokens:
    """Ids of a shard in a bucket: as an array of them is read, a slice at a time, through the cache of blocks."""

    def __init__(self, blocks: CachedObject, dtype: np.dtype) -> None:
        self._blocks, self.dtype = blocks, np.dtype(dtype)
        self._in_block, self._with_next = BLOCK_BYTES // self.dtype.itemsize, blocks.map.with_next
        self.array = blocks.map.bytes.view(dtype)
        """All ids; only what ``have`` was asked for may be read, within ``cache``."""
        self.cache = blocks.cache

    def __getitem__(self, part: slice) -> np.ndarray:
        """A copy of ids [stop - start]. Raises UserError where they cannot be fetched."""
        if part.stop <= part.start:
            return np.empty(0, self.dtype)
        with self.cache:
            self.have(np.array([part.start]), part.stop - part.start)
            return self.array[part].copy()

    def have(self, starts: np.ndarray, count: int) -> None:
        """Have ``count`` ids from each of ``starts`` [n] on. Raises UserError as ``[]``."""
        if count > self._in_block or not self._with_next[starts // self._in_block].all():
            self._blocks.have(starts * self.dtype.itemsize, count * self.dtype.itemsize)

    def ask_for(self, start: int, stop: int) -> None:
        """Have ids ``start`` to ``stop`` fetched. Returns at once."""
        self._blocks.ask_for(start * self.dtype.itemsize, stop * self.dtype.itemsize)


def stands_for(path: Path) -> ObjectFacts:
    """The object that a copy stands for when a shard is opened: its tokens are read of that one. Raises UserError where
    it has no mark, as while another start downloads it again."""
    found = marked(path)
    if found is None:
        raise UserError(f"data: {path} is being fetched by another start. Start again.")
    return found


def tokens_of(path: Path, dtype: np.dtype, cache: BlockCache | None, of: ObjectFacts | None) -> BlockTokens | None:
    """What reads the ids of a `.bin` that stands for an object; None for a file of its own.

    Raises UserError where it is to be read without a cache: what is on the disk is a hole.
    """
    if cache is not None and of is not None:
        return BlockTokens(CachedObject(cache, of), dtype)
    if found := marked(path):
        raise UserError(f"{path} stands for {found.url}, of which it holds the ends alone. Copy that object to a disk.")
    return None
