"""What follows when every unit has its shard: documents shuffled over all of them, shards joined."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from data.manifest import FileSum, ShardManifest
from data.order import permute
from data.shard_writer import ShardWriter
from data.shards import Shard
from tools.preprocess.output import (
    is_complete,
    read_unit,
    remove,
    saying_where_no_space_is,
)
from tools.preprocess.tokenize_unit import TokenizeJob
from tools.preprocess.worker_pool import Report

PIECE_TOKENS = 32 << 20
"""Tokens gathered before they are written."""


@dataclass(slots=True)
class Shuffle:
    """Output shard j of n takes the documents j D/n to (j+1) D/n of a keyed permutation of all D: it follows from
    the units and the seed alone, needs no list of documents, and any number of workers write at once.

    Reading jumps from document to document: it runs at the disk's speed for small reads, or from memory.
    """

    job: TokenizeJob
    seed: int
    made: list[Path]
    """Prefixes of the shards to write: as many as units that hold documents."""
    shards: list[Shard] = field(init=False)
    ends: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        prefixes = [self.job.prefix(index) for index in range(len(self.job.units))]
        held = [prefix for prefix in prefixes if read_unit(prefix).documents]
        self.shards = [Shard(prefix) for prefix in held]
        self.ends = np.cumsum([shard.document_count for shard in self.shards], dtype=np.int64)

    def run_task(self, index: int, report: Report) -> None:
        """Write one shuffled shard."""
        total = int(self.ends[-1])
        first, last = total * index // len(self.made), total * (index + 1) // len(self.made)
        documents = permute(np.arange(first, last), total, f"triplane documents {self.seed}")
        units, starts, lengths = self._locate(documents)

        def describe(writer: ShardWriter, files: dict[str, FileSum]) -> ShardManifest:
            source = (f"documents {first}:{last} of {total}, shuffled with seed {self.seed}",)
            return self.job.manifest(writer, files, source=source, counts={})

        prefix, vocab_size = self.made[index], self.job.tokenizer.vocab_size
        with saying_where_no_space_is(prefix), ShardWriter(prefix, vocab_size, describe) as writer:
            for piece in np.split(np.arange(len(documents)), _cuts(lengths)):
                rows = zip(units[piece].tolist(), starts[piece].tolist(), lengths[piece].tolist(), strict=True)
                tokens = [self.shards[unit].tokens[start : start + length] for unit, start, length in rows]
                if tokens:
                    gathered = np.concatenate(tokens)
                    writer.add_documents(gathered, lengths[piece])
                    report(gathered.nbytes, gathered.size)

    def _locate(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Unit, first token and tokens of each of `documents` [n]; all [n] int64."""
        units = np.searchsorted(self.ends, documents, side="right")
        starts, lengths = np.empty_like(documents), np.empty_like(documents)
        for unit in np.unique(units):
            chosen = units == unit
            shard = self.shards[unit]
            local = documents[chosen] - (int(self.ends[unit]) - shard.document_count)
            own = shard.document_lengths()
            lengths[chosen] = own[local]
            starts[chosen] = (np.cumsum(own) - own)[local]
        return units, starts, lengths


def _cuts(lengths: np.ndarray) -> np.ndarray:
    """Where to cut documents of these lengths into pieces of about PIECE_TOKENS."""
    return np.flatnonzero(np.diff(np.cumsum(lengths) // PIECE_TOKENS, prepend=0))


def join(job: TokenizeJob, prefixes: list[Path], target: Path, report: Callable[[int], object]) -> None:
    """Write the documents of shards, one shard after another, to one; then remove them."""
    if not is_complete(target):

        def describe(writer: ShardWriter, files: dict[str, FileSum]) -> ShardManifest:
            source = tuple(f"{prefix.parent.name}/{prefix.name}" for prefix in prefixes)  # says whose pair it is
            return job.manifest(writer, files, source=source, counts={})

        vocab_size = job.tokenizer.vocab_size
        with saying_where_no_space_is(target), ShardWriter(target, vocab_size, describe) as writer:
            for prefix in prefixes:
                shard = Shard(prefix)
                for start in range(0, shard.token_count, PIECE_TOKENS):
                    writer.add(shard.tokens[start : start + PIECE_TOKENS])
                    report(min(PIECE_TOKENS, shard.token_count - start) * shard.dtype.itemsize)
                writer.end_documents(shard.document_lengths())
    for prefix in prefixes:
        remove(prefix)
