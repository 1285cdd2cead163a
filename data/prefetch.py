"""Reading ahead in a thread, into pinned memory where the tokens go to a GPU."""

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor


class Reads(Protocol):
    """What tokens are read from."""

    def fetch(self, sample_indices: np.ndarray) -> np.ndarray:
        """Tokens [n, s+1] int32 of global sample indices [n] int64."""


class Ring:
    """Buffers of pinned memory, used in turn: a GPU copies out of them while the program goes on.

    A buffer is filled again only when the copies that were asked for while it was the current one have happened,
    which an event after them says. Pinning costs about a millisecond a megabyte, once for each buffer.
    """

    def __init__(self, count: int, pinned: bool = True) -> None:
        self._pinned = pinned
        self._buffers: list[Tensor | None] = [None] * count
        self._copied: list[torch.cuda.Event | None] = [None] * count
        self._current: int | None = None

    def fill(self, slot: int, tokens: np.ndarray) -> Tensor:
        """Put tokens [n, s+1] into a buffer, when it is free: the buffer's part that holds them."""
        event = self._copied[slot]
        if event is not None:
            event.synchronize()
        buffer = self._buffers[slot]
        if buffer is None or buffer.numel() < tokens.size:
            buffer = self._buffers[slot] = torch.empty(tokens.size, dtype=torch.int32, pin_memory=self._pinned)
        part = buffer[: tokens.size].view(tokens.shape)
        part.numpy()[:] = tokens
        return part

    def use(self, slot: int) -> None:
        """Make a buffer the current one; what was to be copied out of the one before has been asked for by now."""
        if self._current is not None and self._pinned:
            event = torch.cuda.Event()
            event.record()
            self._copied[self._current] = event
        self._current = slot


class Prefetcher:
    """Iterates over tokens [n, s+1] int32, one request of sample indices [n] after another, read ahead in a
    thread. An error while reading is raised by the `next` that would have returned the tokens.

    Make it in the process that uses it: a thread does not survive a fork. `requests` is advanced `depth`
    requests ahead, in the caller's thread. With a `ring` of `depth` + 2 buffers, tokens lie in one of them, until
    the second `next` after the one that returned them.
    """

    def __init__(self, source: Reads, requests: Iterator[np.ndarray], depth: int = 2, ring: Ring | None = None) -> None:
        self.data_wait_s = 0.0
        """Seconds that the last `next` waited for the disk."""
        self._source = source
        self._requests = requests
        self._ring, self._slots, self._asked, self._given = ring, depth + 2, 0, 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="data")
        self._pending: deque[Future[Tensor]] = deque()
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
        if self._ring is not None:
            self._ring.use(self._given % self._slots)
        self._given += 1
        self._ask()
        return tokens

    def close(self) -> None:
        """Stop reading ahead; what is being read is finished first."""
        self._thread.shutdown(cancel_futures=True)

    def _ask(self) -> None:
        request = next(self._requests, None)
        if request is not None:
            self._pending.append(self._thread.submit(self._read, request, self._asked % self._slots))
            self._asked += 1

    def _read(self, request: np.ndarray, slot: int) -> Tensor:
        tokens = self._source.fetch(request)
        return torch.from_numpy(tokens) if self._ring is None else self._ring.fill(slot, tokens)
