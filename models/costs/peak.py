"""Bytes on a rank of one pipeline stage of each case, by category, at the peak of a step."""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from models.costs.activations import block_bytes, depth_bytes, in_flight, lookup_bytes, loss_bytes, stream_bytes
from models.costs.candidate import Candidate
from models.costs.cases import FORMATS, Column, ColumnGroup, MemoryColumns, PeakBytes, element_bytes, tokens
from models.costs.mixers import kind_bytes
from models.costs.offloaded_modules import offloaded_bytes
from models.costs.sizes import ATTENTION_AND_MLP
from models.costs.stage_parameters import FP4_COPIES, FP8_COPIES
from models.costs.states import Blocks, BlockStack, Gathered, gathered_bytes, state_bytes

LIBRARY_BYTES = 1.6e9
"""CUDA's context, cuBLAS's and cuDNN's workspaces."""
GROUP_BYTES = 1.3e9
"""Of each axis of parallelism: NCCL's buffers, and what its collectives' own tensors break up of the free memory. Both
from what 72 published peaks hold beyond the tensors that are counted here."""
ROUNDS = 3
"""Of PP microbatches each, after which an interleaved schedule repeats itself."""


def workspace_bytes(layout: ColumnGroup) -> Column:
    """Beside the tensors, on a GPU."""
    axes = np.array([layout.tp, layout.pp, layout.cp, layout.ep, layout.dp])
    return np.asarray(LIBRARY_BYTES + GROUP_BYTES * (axes > 1).sum(axis=0))


class Recomputed(NamedTuple):
    """Beside what the layouts recompute: sublayers of some blocks, each from its own input; and modules whose inputs
    wait on the host, which a block has back in the same way."""

    spared: Column | float = 0.0
    """Bytes that all of them together do not keep, of a microbatch."""
    largest: Column | float = 0.0
    """Of these, the bytes that are back at once while backward passes run: of the one that spares most."""
    at_the_loss: Column | float = 0.0
    """Of these, the bytes that never went: the backward pass begins with them."""


AS_LAID_OUT = Recomputed()


def stage_memory(
    columns: MemoryColumns,
    stacks: Sequence[BlockStack],
    layouts: Sequence[Candidate],
    stages: Sequence[int],
    recomputed: Recomputed = AS_LAID_OUT,
) -> PeakBytes:
    """Of one stage of each case. The block method recomputes only the first layers of each chunk: in between, by their
    share."""
    found, kept = _stage_memory(columns, stacks, layouts, stages, recomputed), columns.software.kept_blocks
    if np.any(kept > 0):
        whole = _stage_memory(columns.recomputing("none"), stacks, layouts, stages, recomputed)
        for name in ("activations", "host"):
            own, other = getattr(found, name), getattr(whole, name)
            setattr(found, name, np.where(kept > 0, own * (1 - kept) + other * kept, own))
    return found


def _stage_memory(
    columns: MemoryColumns,
    stacks: Sequence[BlockStack],
    layouts: Sequence[Candidate],
    stages: Sequence[int],
    recomputed: Recomputed,
) -> PeakBytes:
    looked_at = list(zip(stacks, layouts, stages, strict=True))
    held = np.array([stack.held(layout, stage) for stack, layout, stage in looked_at], np.float64).T
    dense, expert = held[:2]
    own = [stack.blocks(layout)[stage] for stack, layout, stage in looked_at]
    plain, mixtures = np.array([(each.plain, each.mixtures) for each in own], np.float64).T
    number, layout, software = np.array(stages, dtype=np.float64), columns.layout, columns.software
    depths = columns.model.extra_heads * (number == layout.pp - 1)
    crowded = np.ones((columns.count, len(Crowding._fields)))
    for case in np.flatnonzero(layout.vpp > 1):
        crowded[case] = _crowding(*looked_at[case], int(depths[case]))
    plain, mixtures = plain + depths * (mixtures == 0), mixtures + depths * (mixtures > 0)
    weights, gradients, optimizer, host = state_bytes(held, layout, columns.format == FORMATS.index("fp32"), software)
    small = (columns.format >= 1) & (columns.format <= 3) & (layout.zero < 3) & (software.by_unit == 0)
    # beside the 16-bit weights, or in their stead
    copies = np.where(columns.format == FORMATS.index("fp4"), FP4_COPIES, FP8_COPIES)
    casts = np.where(small & (software.fp8_weights == 0), copies, 0.0) * (dense + expert)
    there, others = (plain, mixtures), _others(own)
    if np.any(software.offloaded_modules > 0):
        recomputed, sent = _with_modules_offloaded(columns, there, others, recomputed)
        host = host + in_flight(columns, number) * crowded.T[0] * sent
    gathered = gathered_bytes(columns, number, (dense, expert), plain + mixtures)
    activations, of_blocks = _activations(columns, number, there, others, crowded, recomputed, gathered)
    away = offloaded_share(columns) * (1 - depths / np.maximum(1, plain + mixtures))  # depths keep theirs
    if np.any(away > 0):
        least, _ = _activations(columns.recomputing("full"), number, there, others, crowded, AS_LAID_OUT, gathered)
        activations = activations * (1 - away) + np.minimum(least, activations) * away
        host = host + away * of_blocks
    return PeakBytes(
        weights=weights + casts,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        workspace=np.where(software.cuda > 0, workspace_bytes(layout) + columns.published.bucket_bytes, 0.0),
        stage=number,
        host=np.asarray(host),
    )


def _with_modules_offloaded(
    columns: MemoryColumns, blocks: tuple[Column, Column], others: dict[str, Column], recomputed: Recomputed
) -> tuple[Recomputed, Column]:
    """What a stage keeps less of a microbatch, and sends to the host: of blocks of attention and an MLP, or experts.

    Two blocks are on the GPU while backward passes run: the one at work, and the one before it, on its way back; and
    depths of multi-token prediction. One is there at the loss, which megatron-core sends in the first iteration alone
    (0.19.2, fine_grained_activation_offload.py:587). On the host stays what that iteration has sent, which is
    everything, in megatron-core's pool of pinned memory.
    """
    counts = _attention_and_mlp(columns, blocks, others)
    dense, experts = (offloaded_bytes(columns, experts=experts) for experts in (False, True))
    freed, sent = (counts[0] * one + counts[1] * other for one, other in zip(dense, experts, strict=True))
    of_a_block = freed / np.maximum(1, blocks[0] + blocks[1])
    back = np.minimum(freed, (2 + columns.model.extra_heads) * of_a_block)
    return Recomputed(recomputed.spared + freed, recomputed.largest + back, recomputed.at_the_loss + of_a_block), sent


def _attention_and_mlp(
    columns: MemoryColumns, blocks: tuple[Column, Column], others: dict[str, Column]
) -> tuple[Column, Column]:
    """blocks without those that ``others`` counts."""
    plain, mixtures = (
        count - sum((number for kind, number in others.items() if ("E" in kind) == experts), np.zeros(columns.count))
        for count, experts in zip(blocks, (False, True), strict=True)
    )
    return plain, mixtures


def offloaded_share(columns: MemoryColumns) -> Column:
    """Of a stage's blocks, those whose activations wait on the host. A GPU holds of them about what full recomputation
    holds: those of the block that computes, and for those that are on their way as much as each block's input is."""
    layout = columns.layout
    return np.minimum(1.0, columns.software.offloaded_blocks * layout.pp * layout.vpp / columns.model.layers)


class Crowding(NamedTuple):
    """Blocks that a stage holds of chunks of different sizes, over what as many chunks of the mean size would be.

    Interleaved, a stage passes PP microbatches through its first chunk, as many through the second, and so on; backward
    through the last first (arXiv:2104.04473, section 2.2). Where chunks differ it holds most not when its warm-up ends,
    but when the next round's large chunks have come in and only small ones have been given back.
    """

    most: float = 1.0
    at_the_end: float = 1.0
    """While the last chunk is at work, where the last stage has the loss."""
    at_the_start: float = 1.0
    """As a backward pass of the first chunk ends, where the first stage has the embedding."""


@cache
def crowding(sizes: tuple[int, ...], stage: int, pp: int, microbatches: int) -> Crowding:
    """Of one stage, at most.

    sizes: blocks of each chunk of this stage, first to last.
    """
    vpp, rounds = len(sizes), max(1, min(ROUNDS, microbatches // pp))
    forward, backward = _held(sizes, pp, rounds), _held(sizes[::-1], pp, rounds)
    warmed_up = min(2 * (pp - stage - 1) + (vpp - 1) * pp + 1, len(forward) - 1)
    mean = warmed_up * sum(sizes) / vpp
    if not mean:
        return Crowding()
    came = forward[warmed_up:] + forward[-1:] * warmed_up  # and nothing more, while the last ones are given back
    before = [each - gone for each, gone in zip(came, backward, strict=False)]
    turn = [number // pp % vpp for number in range(len(before))]  # of the chunk that is given back, the last one first
    last = [held for held, own in zip(before, turn, strict=True) if own == 0]
    first = [held - sizes[0] for held, own in zip(before, turn, strict=True) if own == vpp - 1]
    return Crowding(max(before) / mean, max(last) / mean, max(first) / mean)


def _held(sizes: Sequence[int], pp: int, rounds: int) -> list[int]:
    """After so many passes, none first."""
    return list(accumulate([size for _ in range(rounds) for size in sizes for _ in range(pp)], initial=0))


def _crowding(stack: BlockStack, layout: Candidate, stage: int, depths: int) -> Crowding:
    """Of interleaved chunks; depths of multi-token prediction are in the last one."""
    *own, last = stack.chunks(layout)[stage :: layout.pp]
    return crowding((*own, last + depths), stage, layout.pp, layout.microbatches)


def _others(own: Sequence[Blocks]) -> dict[str, Column]:
    """How many blocks each case has of each kind that is not attention and an MLP: of hybrids."""
    kinds = dict.fromkeys(kind for each in own for kind in each.kinds if kind not in ATTENTION_AND_MLP)
    return {kind: np.array([each.kinds.get(kind, 0) for each in own], np.float64) for kind in kinds}


def _activations(
    columns: MemoryColumns,
    stage: Column,
    blocks: tuple[Column, Column],
    others: dict[str, Column],
    crowded: Column,
    recomputed: Recomputed,
    gathered: Gathered,
) -> tuple[Column, Column]:
    """At the peak, with what is gathered then; and what blocks have kept by then for their backward passes.

    blocks: without experts, and with; others: those of them that ``_others`` counts. crowded: of each case all of
    ``Crowding``."""
    plain, mixtures = _attention_and_mlp(columns, blocks, others)
    dense, experts = block_bytes(columns, experts=False), block_bytes(columns, experts=True)
    kept = plain * dense.kept + np.where(mixtures > 0, mixtures * experts.kept, 0.0)
    working = np.maximum(np.where(plain > 0, dense.working, 0.0), np.where(mixtures > 0, experts.working, 0.0))
    for kind, number in others.items():
        of_kind = kind_bytes(columns, kind)
        kept = kept + np.where(number > 0, number * of_kind.kept, 0.0)
        working = np.maximum(working, np.where(number > 0, of_kind.working, 0.0))
    kept, working = kept - recomputed.spared, working + recomputed.largest
    last = stage == columns.layout.pp - 1
    loss = loss_bytes(columns) * (1 + columns.model.extra_heads)
    loss = np.maximum(loss, depth_bytes(columns)) + recomputed.at_the_loss + gathered.at_the_loss
    loss = np.where(last, loss, 0.0)
    most, at_the_end, at_the_start = (in_flight(columns, stage) * share for share in crowded.T)
    ends = 2 * element_bytes(columns) * tokens(columns) * columns.model.hidden
    kept = kept + np.where((columns.published.keeps_stage_ends > 0) & (columns.layout.pp > 1), ends, 0.0)
    # interleaved, sends overlap: an output on its way, the next input, a gradient that has come
    passing = np.where(columns.layout.vpp > 1, 3 * stream_bytes(columns), 0.0)
    at_the_start = np.where(columns.layout.vpp > 1, at_the_start, most - 1)
    working = working + gathered.at_work
    lookup = np.where(stage == 0, at_the_start * kept + lookup_bytes(columns) + gathered.at_work, 0.0)
    found = np.maximum(most * kept + working, at_the_end * kept + np.maximum(working, loss))
    return np.maximum(found, lookup) + passing, most * kept
