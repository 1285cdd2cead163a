"""What stands on this machine for an object in a bucket: the mark beside it, and how tokens are read through it."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import numpy as np

from data.block_cache import BlockCache, CachedObject
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

    def __getitem__(self, part: slice) -> np.ndarray:
        """Ids [stop - start]. Raises UserError where they cannot be fetched."""
        tokens = np.empty(part.stop - part.start, self.dtype)
        self._blocks.read(part.start * self.dtype.itemsize, memoryview(tokens).cast("B"))
        return tokens

    def ask_for(self, start: int, stop: int) -> None:
        """Have ids ``start`` to ``stop`` fetched. Returns at once."""
        self._blocks.ask_for(start * self.dtype.itemsize, stop * self.dtype.itemsize)


def tokens_of(path: Path, dtype: np.dtype, cache: BlockCache | None) -> BlockTokens | None:
    """What reads the ids of a `.bin` that stands for an object; None for a file of its own.

    Raises UserError where it is to be read without a cache: what is on the disk is a hole.
    """
    found = marked(path)
    if found is None:
        return None
    if cache is None:
        raise UserError(f"{path} stands for {found.url}, of which it holds the ends alone. Copy that object to a disk.")
    return BlockTokens(CachedObject(cache, found), dtype)
