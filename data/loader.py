"""This rank's batches: which ranks read, reading ahead, and what a model takes."""

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from data.order import global_batch_indices, rank_indices
from data.source import TokenSource, build_source

__all__ = [
    "Batch",
    "Prefetcher",
    "TokenSource",
    "build_source",
    "global_batch_indices",
    "needs_batch",
    "rank_indices",
    "to_batch",
]


class Batch(NamedTuple):
    """One microbatch; every tensor is [b, s]."""

    tokens: Tensor
    """int64"""
    labels: Tensor
    """int64; the token after each token"""
    loss_mask: Tensor
    """float32; 1 where the loss counts"""
    position_ids: Tensor
    """int64"""


def to_batch(window: Tensor, device: torch.device) -> Batch:
    """Derive a microbatch on `device` from its tokens [b, s+1] int32: a seventh of the bytes goes there."""
    ids = window.to(device, non_blocking=True).long()
    tokens = ids[:, :-1].contiguous()
    positions = torch.arange(tokens.shape[1], device=device).expand_as(tokens).contiguous()
    return Batch(
        tokens=tokens,
        labels=ids[:, 1:].contiguous(),
        loss_mask=torch.ones_like(tokens, dtype=torch.float32),
        position_ids=positions,
    )


def needs_batch(pipeline_rank: int, pipeline_size: int, tensor_rank: int) -> bool:
    """Whether this rank reads tokens: the first stage embeds them and the last is scored on them; the other
    tensor ranks receive them from tensor rank 0.
    """
    return tensor_rank == 0 and pipeline_rank in (0, pipeline_size - 1)


class Prefetcher:
    """Iterates over tokens [n, s+1] int32, one request of sample indices [n] after another, read ahead in a
    thread. An error while reading is raised by the `next` that would have returned the tokens.

    Make it in the process that uses it: a thread does not survive a fork. `requests` is advanced `depth`
    requests ahead, in the caller's thread.
    """

    def __init__(self, source: TokenSource, requests: Iterator[np.ndarray], depth: int = 2) -> None:
        self.data_wait_s = 0.0
        """Seconds that the last `next` waited for the disk."""
        self._source = source
        self._requests = requests
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="data")
        self._pending: deque[Future[np.ndarray]] = deque()
        for _ in range(depth):
            self._ask()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Tensor:
        if not self._pending:
            raise StopIteration
        start_s = time.perf_counter()
        tokens = self._pending.popleft().result()
        self.data_wait_s = time.perf_counter() - start_s
        self._ask()
        return torch.from_numpy(tokens)

    def close(self) -> None:
        """Stop reading ahead; what is being read is finished first."""
        self._thread.shutdown(cancel_futures=True)

    def _ask(self) -> None:
        request = next(self._requests, None)
        if request is not None:
            self._pending.append(self._thread.submit(self._source.fetch, request))
