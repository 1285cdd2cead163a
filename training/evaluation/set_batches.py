"""A validation set's microbatches on this rank: as many on every data rank, filled up where the text has ended."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.full_pass import FullPass
from data.loader import Batch, Packing, Prefetcher, Ring, needs_batch, to_batch
from data.prepared import NO_TOKEN, Samples
from parallel.groups import Ranks
from training.batches import DEPTH, context_slice, shared_windows
from training.config.train_config import TrainConfig
from training.evaluation.validation_sets import OpenSet

NO_SAMPLE = -1


class SetBatch(NamedTuple):
    """One microbatch, and where its losses are added up."""

    batch: Batch | None
    """None on a stage that needs no tokens."""
    rows: Tensor
    """[b] int64: which of the set's metrics each sample counts in, beside the first."""


def global_batches(samples: Samples, train: TrainConfig, ranks: Ranks) -> list[np.ndarray]:
    """Sample numbers of each global batch [n] int64: ``train.eval_iters`` of them, or, of a full pass, all there are.

    n is a multiple of what all replicas take at once; NO_SAMPLE fills the last batch of a full pass up.
    """
    size = train.global_batch_size
    if not isinstance(samples, FullPass):
        return [np.arange(size, dtype=np.int64) + number * size for number in range(train.eval_iters)]
    at_once = train.micro_batch_size * ranks.layout.dp * (ranks.layout.pp if ranks.layout.vpp > 1 else 1)
    found = [np.arange(start, min(start + size, samples.count)) for start in range(0, samples.count, size)]
    return [np.pad(one, (0, -len(one) % at_once), constant_values=NO_SAMPLE) for one in found]


class SetBatches:
    """Iterates over the global batches: each gives this rank's microbatches. The ranks that read are training's."""

    def __init__(self, measured: OpenSet, train: TrainConfig, ranks: Ranks, packing: Packing | None) -> None:
        """packing: as in ``BatchStream``."""
        at, layout, samples = ranks.at, ranks.layout, measured.samples
        self.measured, self.ranks = measured, ranks
        self.packing = packing and replace(packing, masked=True)  # sets end where their text does
        self.micro_batch_size, self.length = train.micro_batch_size, samples.seq_length + 1
        self.waiting = [self._own(batch) for batch in global_batches(samples, train, ranks)]
        every_stage = packing is not None and packing.by_document
        self.has_tokens = needs_batch(at.pp, layout.pp, 0, every_stage)
        self.reader: Prefetcher | None = None
        if needs_batch(at.pp, layout.pp, at.tp, every_stage):
            ring = Ring(DEPTH + 2) if ranks.device.type == "cuda" else None
            self.reader = Prefetcher(_WithGaps(samples), iter(self.waiting), DEPTH, ring)

    def __iter__(self) -> Iterator[list[SetBatch]]:
        for indices in self.waiting:
            counted = self.measured.rows_of(np.maximum(indices, 0))
            rows = torch.from_numpy(counted).to(self.ranks.device).split(self.micro_batch_size)
            yield [SetBatch(*each) for each in zip(self._batches(len(indices)), rows, strict=True)]

    def close(self) -> None:
        """Stop reading ahead."""
        if self.reader:
            self.reader.close()

    def _own(self, batch: np.ndarray) -> np.ndarray:
        """This data rank's samples of a global batch, microbatch after microbatch (as data/order.py)."""
        return batch.reshape(-1, self.ranks.layout.dp, self.micro_batch_size)[:, self.ranks.at.dp].reshape(-1)

    def _batches(self, samples: int) -> list[Batch | None]:
        if not self.has_tokens:
            return [None] * (samples // self.micro_batch_size)
        own = next(self.reader) if self.reader else None
        windows = shared_windows(own, samples, self.length, self.ranks)
        return [
            context_slice(to_batch(window, self.ranks.device, self.packing), self.ranks)
            for window in windows.split(self.micro_batch_size)
        ]


class _WithGaps:
    """Samples, and rows of NO_TOKEN for NO_SAMPLE."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def fetch(self, sample_indices: np.ndarray) -> np.ndarray:
        there = sample_indices != NO_SAMPLE
        if there.all():
            return self.samples.fetch(sample_indices)
        windows = np.full((len(there), self.samples.seq_length + 1), NO_TOKEN, np.int32)
        windows[there] = self.samples.fetch(sample_indices[there])
        return windows
