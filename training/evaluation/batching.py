"""Requests for log-likelihoods, packed for all ranks, and the rounds of forward passes that they make.

A request is a text in ids and its continuation; a row is what the model reads of it. Requests that read the same ids
(choices of one token each after the same question) share a row.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parallel.layout import Layout
from training.config.run_config import RunConfig

EMPTY = -1
"""A row that stands for none, so that all replicas run as many."""
LENGTHS = 32
"""Row lengths that occur at most, so that a GPU's allocator sees few shapes."""


@dataclass(kw_only=True, slots=True, frozen=True)
class PackedRequests:
    """Many requests in a few arrays. *target*: a token of a continuation, predicted from the position before it."""

    count: int
    tokens: np.ndarray
    """[sum of lengths] int32: the rows' ids, one row after another."""
    lengths: np.ndarray
    """[rows] int64."""
    target_rows: np.ndarray
    """[targets] int64, ascending."""
    target_positions: np.ndarray
    """[targets] int64: in the row."""
    target_ids: np.ndarray
    """[targets] int64."""
    target_requests: np.ndarray
    """[targets] int64."""


def pack(requests: Sequence[tuple[Sequence[int], Sequence[int]]], seq_length: int) -> PackedRequests:
    """requests: ids of a context, at least one, and of its continuation. What is beyond seq_length is cut from the
    left, as the harness' HFLM does.

    Raises ValueError for a continuation that is empty or longer than seq_length.
    """
    rows: dict[bytes, int] = {}
    kept: list[np.ndarray] = []
    targets: list[tuple[int, int, np.ndarray, int]] = []
    for number, (context, continuation) in enumerate(requests):
        if not context or not 0 < len(continuation) <= seq_length:
            raise ValueError(
                f"a request has {len(context)} tokens and a continuation of {len(continuation)}; expected 1 or more, "
                f"and a continuation of at most model.seq_length = {seq_length}"
            )
        ids = np.array([*context, *continuation][-(seq_length + 1) :], np.int32)
        row = rows.setdefault(ids[:-1].tobytes(), len(rows))
        if row == len(kept):
            kept.append(ids[:-1])
        targets.append((row, len(ids) - 1 - len(continuation), ids[-len(continuation) :], number))
    targets.sort(key=lambda target: target[0])
    sizes = [len(ids) for _, _, ids, _ in targets]
    starts = [np.arange(first, first + len(ids)) for _, first, ids, _ in targets]
    return PackedRequests(
        count=len(requests),
        tokens=np.concatenate(kept or [np.zeros(0, np.int32)]).astype(np.int32),
        lengths=np.array([len(row) for row in kept], np.int64),
        target_rows=np.repeat(np.array([row for row, *_ in targets], np.int64), sizes),
        target_positions=np.concatenate(starts or [np.zeros(0, np.int32)]).astype(np.int64),
        target_ids=np.concatenate([ids for _, _, ids, _ in targets]).astype(np.int64)
        if targets
        else np.zeros(0, np.int64),
        target_requests=np.repeat(np.array([number for *_, number in targets], np.int64), sizes),
    )


@dataclass(kw_only=True, slots=True, frozen=True)
class RowShape:
    """What a forward pass may be: bounds of memory, and what the layout divides."""

    seq_length: int
    """The longest row."""
    tokens: int
    """Of one forward pass on one replica, at most."""
    multiple: int
    """Of row lengths below seq_length."""
    fixed: bool = False
    """Every pass has ``tokens`` tokens in rows of seq_length."""

    def length(self, longest: int) -> int:
        """Of the rows of a round whose longest row this is."""
        if self.fixed:
            return self.seq_length
        return min(-(-longest // self.multiple) * self.multiple, self.seq_length)


def row_shape(config: RunConfig, micro_batch_size: int, layout: Layout) -> RowShape:
    """Products in fp8 or fp4 are of multiples of 32 tokens; with userbuffers a pass has training's sizes."""
    seq_length = config.model.seq_length
    multiple = math.lcm(
        2 * layout.cp if layout.cp > 1 else 1,
        layout.cp * layout.tp if config.parallel.sequence_parallel else 1,
        32 * layout.cp if config.precision.products is not None else 1,
    )
    return RowShape(
        seq_length=seq_length,
        tokens=micro_batch_size * seq_length,
        multiple=-(-max(1, seq_length // LENGTHS) // multiple) * multiple,
        fixed=config.kernels.tp_comm_overlap,
    )


@dataclass(kw_only=True, slots=True, frozen=True)
class Round:
    """Microbatches that run together, all of one shape."""

    length: int
    """Tokens of a row, filled up on the right."""
    rows: np.ndarray
    """[microbatches, dp, b] int64: rows of each microbatch of each replica, or EMPTY."""


def rounds(lengths: np.ndarray, shape: RowShape, layout: Layout) -> list[Round]:
    """All rows, the longest first, dealt to the replicas: each runs as many forward passes, of the same sizes.

    A pipeline gets up to four microbatches a stage at once, so that its stages seldom wait.
    """
    order = np.argsort(-lengths, kind="stable")
    unit = layout.pp if layout.vpp > 1 else 1
    found, start = [], 0
    while start < len(order):
        length, left = shape.length(int(lengths[order[start]])), len(order) - start
        most = max(1, shape.tokens // length)
        microbatches = min(4 * layout.pp if layout.pp > 1 else 1, -(-left // (layout.dp * most)))
        microbatches = -(-microbatches // unit) * unit
        each = most if shape.fixed else min(most, -(-left // (layout.dp * microbatches)))
        rows = np.full(microbatches * layout.dp * each, EMPTY, np.int64)
        taken = order[start : start + len(rows)]
        rows[: len(taken)] = taken
        found.append(Round(length=length, rows=rows.reshape(microbatches, layout.dp, each)))
        start += len(taken)
    return found
