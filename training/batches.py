"""The microbatches of each iteration on this rank: who reads tokens, who receives them, and their context slices."""

import itertools
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from data.gaps import NO_GAPS, Gaps
from data.loader import Batch, Packing, Prefetcher, Ring, needs_batch, to_batch
from data.order import rank_indices
from data.prepared import Samples, SourceProgress
from data.transformed import Transformed
from parallel import metrics
from parallel.groups import Ranks
from training.config.batch_schedule import BatchSchedule

DEPTH = 2
"""Iterations that are read ahead."""


class Stream(Protocol):
    """Where a step gets its microbatches."""

    @property
    def consumed_samples(self) -> int:
        """Samples of all global batches given so far, over all ranks, earlier runs included."""
        ...

    def next(self, seq_length: int) -> list[Batch | None]:
        """The next iteration's microbatches on this rank."""
        ...


class BatchStream:
    """Iterates over iterations: each gives this rank's microbatches, or Nones on a stage that needs no tokens.

    Only TP rank 0 of the first and the last stage reads, or of every stage where documents are kept apart; its TP peers
    receive int32 ids. Context-parallel ranks read the same samples and keep their zigzag slices.
    """

    def __init__(
        self,
        open_source: Callable[[], Samples],
        ranks: Ranks,
        schedule: BatchSchedule,
        micro_batch_size: int,
        consumed_samples: int,
        packing: Packing | None = None,
        gaps: Gaps = NO_GAPS,
    ) -> None:
        """packing: how documents are kept apart; None: each sample is one text. gaps: in the order of samples."""
        at, layout = ranks.at, ranks.layout
        self.ranks, self.schedule, self.micro_batch_size = ranks, schedule, micro_batch_size
        self.consumed_samples, self.packing, self.gaps = consumed_samples, packing, gaps
        self.newest: list[Batch | None] = []
        """What ``next`` gave last."""
        every_stage = packing is not None and packing.by_document
        self.has_tokens = needs_batch(at.pp, layout.pp, 0, every_stage)
        self.source: Samples | None = None
        self.reader: Prefetcher | None = None
        if needs_batch(at.pp, layout.pp, at.tp, every_stage):
            self.source = open_source()
            self.seq_length = self.source.seq_length
            ring = Ring(DEPTH + 2) if ranks.device.type == "cuda" else None
            self.reader = Prefetcher(self.source, self._requests(consumed_samples), DEPTH, ring)

    def next(self, seq_length: int) -> list[Batch | None]:
        """The microbatches of the next iteration, in the order the schedule runs them. Batch tensors are [b, s/cp]."""
        microbatches = self.schedule.num_microbatches(
            self.consumed_samples, self.micro_batch_size, self.ranks.layout.dp
        )
        self.consumed_samples += microbatches * self.micro_batch_size * self.ranks.layout.dp
        self.newest = self._next(microbatches, seq_length)
        self._record_changes()
        return self.newest

    def _record_changes(self) -> None:
        """What was counted of the samples of this iteration, once: other stages and context ranks read the same."""
        at = self.ranks.at
        if isinstance(self.source, Transformed) and not (at.pp or at.cp):
            for name, count in self.source.counted.popleft().items():
                metrics.record(name, count, "sum")

    def _next(self, microbatches: int, seq_length: int) -> list[Batch | None]:
        if not self.has_tokens:
            return [None] * microbatches
        windows = shared_windows(
            next(self.reader) if self.reader else None, microbatches * self.micro_batch_size, seq_length + 1, self.ranks
        )
        return [
            context_slice(to_batch(window, self.ranks.device, self.packing), self.ranks)
            for window in windows.split(self.micro_batch_size)
        ]

    @property
    def data_wait_s(self) -> float:
        """Seconds that the last ``next`` waited for the disk."""
        return self.reader.data_wait_s if self.reader else 0.0

    def sources(self) -> dict[str, SourceProgress]:
        """How far each source has been read, by its name; none on a rank that reads nothing."""
        return self.source.sources(self.gaps.behind(self.consumed_samples)) if self.source else {}

    def close(self) -> None:
        """Stop reading ahead."""
        if self.reader:
            self.reader.close()

    def _requests(self, consumed_samples: int) -> Iterator[np.ndarray]:
        """Sample indices of this data rank, iteration after iteration; endless, whatever train_iters is."""
        for _ in itertools.count():
            microbatches = self.schedule.num_microbatches(consumed_samples, self.micro_batch_size, self.ranks.layout.dp)
            indices = rank_indices(
                consumed_samples, microbatches, self.micro_batch_size, self.ranks.at.dp, self.ranks.layout.dp
            )
            yield self.gaps.positions(indices.reshape(-1))
            consumed_samples += microbatches * self.micro_batch_size * self.ranks.layout.dp


def shared_windows(windows: Tensor | None, samples: int, length: int, ranks: Ranks) -> Tensor:
    """Token ids [samples, length] int32 from TP rank 0 to its TP peers, which have None: one broadcast."""
    if ranks.layout.tp == 1:
        assert windows is not None
        return windows
    if windows is None:
        windows = torch.empty(samples, length, dtype=torch.int32)
    shared = windows.to(ranks.device, non_blocking=True)
    dist.broadcast(shared, src=dist.get_global_rank(ranks.pgs.tp, 0), group=ranks.pgs.tp)
    return shared


def context_slice(batch: Batch, ranks: Ranks) -> Batch:
    """Pieces r and 2 cp - 1 - r of 2 cp, so that every context rank has as much causal work (arXiv:2310.03294)."""
    cp = ranks.layout.cp
    if cp == 1:
        return batch
    return Batch._make(None if tensor is None else zigzag(tensor, cp, ranks.at.cp) for tensor in batch)


def zigzag(tensor: Tensor, cp: int, rank: int) -> Tensor:
    """A context rank's two pieces of [b, s]: [b, s/cp]."""
    pieces = tensor.chunk(2 * cp, dim=1)
    return torch.cat([pieces[rank], pieces[2 * cp - 1 - rank]], dim=1)
