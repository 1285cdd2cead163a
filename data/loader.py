"""This rank's batches: which ranks read, reading ahead, and what a model takes.

A thread reads ahead, into pinned memory where the tokens go to a GPU.
"""

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from data.config import DataConfig
from data.prepared import FetchesAhead


class Reads(Protocol):
    """What tokens are read from."""

    def fetch(self, sample_indices: np.ndarray) -> np.ndarray:
        """Tokens [n, s+1] int32 of global sample indices [n] int64."""


AHEAD = 512
"""Samples that are fetched ahead of their turn, of each rank: at most as many blocks of 1 MiB of the cache."""


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
    the second `next` after the one that returned them. A source that fetches ahead is asked for AHEAD samples
    before their turn; `requests` is advanced as far.
    """

    def __init__(self, source: Reads, requests: Iterator[np.ndarray], depth: int = 2, ring: Ring | None = None) -> None:
        self.data_wait_s = 0.0
        """Seconds that the last `next` waited for the disk."""
        self._source = source
        self._requests = requests
        self._ring, self._slots, self._asked, self._given = ring, depth + 2, 0, 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="data")
        self._pending: deque[Future[Tensor]] = deque()
        self._fetching: deque[np.ndarray] = deque()
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
        request = self._next_request()
        if request is not None:
            self._pending.append(self._thread.submit(self._read, request, self._asked % self._slots))
            self._asked += 1

    def _next_request(self) -> np.ndarray | None:
        if not isinstance(self._source, FetchesAhead):
            return next(self._requests, None)
        while not self._fetching or sum(map(len, self._fetching)) < AHEAD:
            if (request := next(self._requests, None)) is None:
                break
            self._fetching.append(request)
            self._thread.submit(self._source.ask_for, request)  # what fails is said by the reading
        return self._fetching.popleft() if self._fetching else None

    def _read(self, request: np.ndarray, slot: int) -> Tensor:
        tokens = self._source.fetch(request)
        return torch.from_numpy(tokens) if self._ring is None else self._ring.fill(slot, tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How the documents within a sample are kept apart."""

    eod: int
    """The id that ends a document; it belongs to the document it ends."""
    reset_attention: bool = False
    """Documents do not see one another."""
    reset_positions: bool = False
    """Positions restart with each document."""
    eod_mask_loss: bool = False
    """No loss for what is predicted from ``eod``."""
    masked: bool = False
    """Whether tokens may be negative, which costs a GPU three kernels a microbatch."""

    @classmethod
    def from_config(cls, config: DataConfig, eod: int) -> Self:
        """What the data section asks for, with the tokenizer's ``eod``."""
        return cls(
            eod=eod,
            reset_attention=config.reset_attention_mask,
            reset_positions=config.reset_position_ids,
            eod_mask_loss=config.eod_mask_loss,
            masked=config.packing == "best_fit" or config.transform is not None or config.fim_rate > 0,
        )

    @property
    def by_document(self) -> bool:
        """Whether every stage computes with where documents start."""
        return self.reset_attention or self.reset_positions


class Batch(NamedTuple):
    """One microbatch; every tensor is [b, s]."""

    tokens: Tensor
    """int64"""
    labels: Tensor
    """int64; the token after each token"""
    loss_mask: Tensor
    """float32; 1 where the loss counts"""
    position_ids: Tensor
    """int64; in the sample, or in the document where positions restart"""
    starts: Tensor | None = None
    """int64; where in the sample each token's document starts. None: documents see one another."""


def to_batch(window: Tensor, device: torch.device, packing: Packing | None = None) -> Batch:
    """Derive a microbatch on `device` from its tokens [b, s+1] int32: a seventh of the bytes goes there.

    A negative one, ~id, is read as `id` and has no loss, where there may be any. Without `packing` a sample is one
    text. With it, Megatron's meaning: get_ltor_masks_and_position_ids.
    """
    window, counted = window.to(device, non_blocking=True), None
    if packing is None or packing.masked:
        counted, window = window[:, 1:] >= 0, window ^ (window >> 31)
    tokens, labels = window[:, :-1].long(), window[:, 1:].long()
    positions = torch.arange(tokens.shape[1], device=device)
    position_ids, starts = positions.expand_as(tokens).contiguous(), None
    if packing and packing.by_document:
        begins = document_starts(window[:, :-1], packing.eod)
        starts = begins if packing.reset_attention else None
        position_ids = positions - begins if packing.reset_positions else position_ids
    loss_mask = torch.ones_like(tokens, dtype=torch.float32) if counted is None else counted.float()
    if packing and packing.eod_mask_loss:
        loss_mask[tokens == packing.eod] = 0.0
    return Batch(
        tokens=tokens,
        labels=labels,
        loss_mask=loss_mask,
        position_ids=position_ids,
        starts=starts,
    )


def document_starts(tokens: Tensor, eod: int) -> Tensor:
    """Position in the sample at which each token's document starts: tokens [b, s], whole numbers, -> [b, s] int64.

    The first document starts at 0, wherever it was cut.
    """
    starts = torch.zeros(tokens.shape, dtype=torch.int64, device=tokens.device)
    positions = torch.arange(1, tokens.shape[1], device=tokens.device)
    torch.mul(tokens[:, :-1] == eod, positions, out=starts[:, 1:])
    return starts.cummax(dim=1).values


def needs_batch(pipeline_rank: int, pipeline_size: int, tensor_rank: int, every_stage: bool = False) -> bool:
    """Whether this rank reads tokens: the first stage embeds them and the last is scored on them; the other
    tensor ranks receive them from tensor rank 0. every_stage: so do those between, to learn where documents start.
    """
    return tensor_rank == 0 and (every_stage or pipeline_rank in (0, pipeline_size - 1))
