"""Log-likelihoods of continuations by the model as it lies on its ranks, in any layout."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from models.layers.compiled import as_written
from parallel.ddp import Chunk, Chunks
from parallel.groups import Ranks
from training.batches import zigzag
from training.checkpoint import model_state, settled
from training.evaluation.batching import EMPTY, PackedRequests, Round, RowShape, rounds
from training.forward_backward import read_outputs
from training.generation.forward import evaluating
from training.step import counted

LOGITS_AT_ONCE = 1 << 26
"""fp32 logits that are looked at together: 256 MiB."""


class RowBatch(NamedTuple):
    """One microbatch of rows on this rank, and its targets."""

    tokens: Tensor
    """[b, s/cp] int64"""
    position_ids: Tensor
    """[b, s/cp] int64"""
    rows: Tensor
    """[targets] int64: in the microbatch. Only targets whose position is on this context rank."""
    positions: Tensor
    """[targets] int64: on this rank."""
    ids: Tensor
    """[targets] int64"""
    requests: Tensor
    """[targets] int64"""


@dataclass(kw_only=True, slots=True, frozen=True)
class Scorer:
    """The model on all ranks, for log-likelihoods. All ranks call it together, with the same requests."""

    chunks: Chunks
    ranks: Ranks
    shape: RowShape
    before_round: Callable[[int, int], None] = field(default=lambda done, count: None)
    """Called with the rounds that are done, and how many there are; may raise, on all ranks."""

    def __call__(self, packed: PackedRequests) -> np.ndarray:
        """[requests, 2] fp64, the same on every rank: the sum of the continuation's log-probabilities, and how many of
        its tokens are not the most probable one."""
        if packed.count == 0:
            return np.zeros((0, 2))
        planned = rounds(packed.lengths, self.shape, self.ranks.layout)
        ends = np.cumsum(packed.lengths)
        results = torch.zeros(packed.count, 2, dtype=torch.float64, device=self.ranks.device)
        with evaluating(self.chunks):
            for number, one in enumerate(planned):
                self.before_round(number, len(planned))
                microbatches = [row_batch(packed, ends, rows[self.ranks.at.dp], one, self.ranks) for rows in one.rows]
                found = read_outputs(
                    self.chunks, microbatches, self.ranks, one.length, one.rows.shape[2], _logits, self._read
                )
                for batch, scores in zip(microbatches, found, strict=False):  # nothing but on the last stage
                    results.index_add_(0, batch.requests, scores)
        results = counted(results, self.ranks)
        dist.all_reduce(results)
        return results.cpu().numpy()

    def _read(self, batch: RowBatch, logits: Tensor) -> Tensor:
        """Log-probability and miss of each target, fp64 [targets, 2]; logits: [b, s/cp, vocabulary / tp]."""
        if not len(batch.ids):
            return logits.new_zeros(0, 2, dtype=torch.float64)
        at_once = max(1, LOGITS_AT_ONCE // logits.shape[-1])
        parts = zip(batch.rows.split(at_once), batch.positions.split(at_once), batch.ids.split(at_once), strict=True)
        return torch.cat([target_scores(logits[rows, at], ids, self.ranks) for rows, at, ids in parts])


def target_scores(logits: Tensor, ids: Tensor, ranks: Ranks) -> Tensor:
    """Log-probability of each id, and 0.0 where it is the most probable one, else 1.0: fp64 [n, 2].

    logits: [n, vocabulary / tp], this rank's part of each target's; TP peers call this together. Of equal logits the
    first counts as the most probable, as torch.argmax has it.
    """
    group, local = ranks.pgs.tp, logits.shape[-1]
    scores = logits.float()
    top, index = scores.max(dim=-1)
    own = ids - ranks.at.tp * local
    here = (own >= 0) & (own < local)
    target = torch.where(here, scores.gather(-1, own.clamp(0, local - 1)[:, None])[:, 0], 0.0)
    highest, first = top.clone(), index + ranks.at.tp * local
    if group.size() > 1:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        first = torch.where(top == highest, first, torch.iinfo(first.dtype).max)
        dist.all_reduce(first, op=dist.ReduceOp.MIN, group=group)
    sums = torch.stack([torch.exp(scores - highest[:, None]).sum(-1), target])
    if group.size() > 1:
        dist.all_reduce(sums, group=group)
    logprob = sums[1] - highest - sums[0].log()
    return torch.stack([logprob.double(), (first != ids).double()], dim=1)


def row_batch(packed: PackedRequests, ends: np.ndarray, rows: np.ndarray, one: Round, ranks: Ranks) -> RowBatch:
    """rows: [b] numbers of this replica's rows, or EMPTY. ends: where each row's ids end in ``packed.tokens``."""
    tokens = np.zeros((len(rows), one.length), np.int64)
    targets = []
    for number, row in enumerate(rows.tolist()):
        if row == EMPTY:
            continue
        tokens[number, : packed.lengths[row]] = packed.tokens[ends[row] - packed.lengths[row] : ends[row]]
        first, last = np.searchsorted(packed.target_rows, [row, row + 1])
        chosen = slice(int(first), int(last))
        where = np.full(chosen.stop - chosen.start, number)
        targets.append(
            np.stack(
                [where, packed.target_positions[chosen], packed.target_ids[chosen], packed.target_requests[chosen]]
            )
        )
    listed = np.concatenate(targets, axis=1) if targets else np.zeros((4, 0), np.int64)
    cp = ranks.layout.cp
    positions = torch.arange(one.length).expand(len(rows), -1)
    ids = torch.from_numpy(tokens)
    if cp > 1:
        ids, positions = zigzag(ids, cp, ranks.at.cp), zigzag(positions, cp, ranks.at.cp)
        local = zigzag_positions(listed[1], one.length, cp, ranks.at.cp)
        listed = np.stack([listed[0], local, listed[2], listed[3]])[:, local >= 0]
    on_device = (part.to(ranks.device) for part in (ids, positions.contiguous(), *torch.from_numpy(listed).unbind()))
    return RowBatch(*on_device)


def zigzag_positions(positions: np.ndarray, length: int, cp: int, rank: int) -> np.ndarray:
    """Where positions of a row of this length lie on a context rank (``batches.zigzag``); -1 on another."""
    size = length // (2 * cp)
    piece, within = np.divmod(positions, size)
    second = np.where(piece == 2 * cp - 1 - rank, size + within, -1)
    return np.where(piece == rank, within, second)


def _logits(batch: RowBatch, chunk: Chunk) -> Tensor:
    """On the last stage [b, s/cp, vocabulary / tp]."""
    return chunk(batch.tokens, batch.position_ids, None)


@contextlib.contextmanager
def forward_only(chunks: Chunks) -> Iterator[None]:
    """Within, parameters are whole and nothing is dropped; fp8's scales and histories are put back. Collective."""
    modes = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.eval()
    try:
        with settled(chunks), as_written(chunks), model_state.fp8_kept(chunks):
            yield
    finally:
        for chunk, mode in zip(chunks, modes, strict=True):
            chunk.train(mode)
