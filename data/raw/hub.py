"""Hugging Face datasets, through `datasets`: of the Hub by streaming, or a folder that `save_to_disk` left."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.raw.inputs import is_saved_dataset
from parallel.errors import UserError

if TYPE_CHECKING:
    from datasets import IterableDataset

ROWS = 10_000
"""Rows of a saved dataset that are one step of the work."""


def count(name: str) -> int:
    """Steps of a dataset: the files that the Hub keeps it in, or blocks of rows of a saved one.

    Raises UserError where it cannot be opened.
    """
    opened = _open(name)
    if is_saved_dataset(Path(name)):
        return -(-len(opened) // ROWS)
    return int(opened.num_shards)


def rows(name: str, start: int, stop: int, skipped: int = 0) -> Iterator[dict[str, Any]]:
    """The rows of steps `start` to `stop`, without the first `skipped` of each."""
    opened = _open(name)
    if is_saved_dataset(Path(name)):
        for step in range(start, stop):
            yield from opened.select(range(step * ROWS + skipped, min((step + 1) * ROWS, len(opened))))
        return
    for step in range(start, stop):
        yield from opened.shard(num_shards=opened.num_shards, index=step).skip(skipped)


def _open(name: str) -> "IterableDataset | Any":
    """name: a folder, or OWNER/NAME[:CONFIGURATION][@SPLIT], split "train" where none is named."""
    try:
        import datasets
    except ImportError:
        raise UserError(f"{name} needs `pip install datasets`.") from None
    try:
        if is_saved_dataset(Path(name)):
            return datasets.load_from_disk(name)
        identity, _, split = name.partition("@")
        identity, _, configuration = identity.partition(":")
        return datasets.load_dataset(
            identity, configuration or None, split=split or "train", streaming=True, token=os.environ.get("HF_TOKEN")
        )
    except Exception as error:  # the library has many kinds, and connection errors of three others
        told = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"dataset {name} cannot be opened: {type(error).__name__}: {told}") from None
