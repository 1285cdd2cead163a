"""Every legal layout, by the program's own checks (``training.config.divisibility``)."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from functools import cache
from typing import Any, cast

from models.config import ModelConfig
from models.costs.candidate import Candidate, Recompute, Zero
from models.costs.flops import flops_per_token
from models.costs.predict import SAFE_SHARE
from models.costs.sizes import ATTENTION_AND_MLP
from models.shapes import GPTShape
from parallel.config import ParallelConfig
from tools.plan.cost.hardware import computable, precisions
from tools.plan.search.request import PlanRequest
from tools.plan.search.splits import stage_choices
from training.config import divisibility

SMALLEST_PIECE, LONG, SMALLEST_OF_SHORT = 1024, 8192, 2048
"""Tokens of a sequence, a long one or a short one, on one context rank: attention's products on less are too small to
be worth a ring."""
USUAL_MICRO_BATCH, LARGE = 8, 2**26
"""Larger ones are tried while the hidden states on a rank are fewer numbers than that, 65,536 tokens of 1,024 channels:
beyond, more rows make no product faster, and bubbles only grow."""
STREAMS = 4
"""Hidden states that a block keeps at least where it is not recomputed whole, and none of it waits on the host: inputs
of its norms, its queries, what attention puts out."""


def candidates(question: PlanRequest) -> list[Candidate]:
    """All of them, in the order of their sizes."""
    return list(_candidates(question))


def _candidates(question: PlanRequest) -> Iterator[Candidate]:
    shape = question.shape
    formats = _formats(question)
    again = [name for name in _recomputations(shape) if question.fixed.get("recompute", name) == name]
    sharded = cast(list[Zero], question.choices("zero", [1, 3]))
    streams = 1 if question.cpu_offloading_num_layers or question.offload_modules else STREAMS
    for grid in _grids(question):
        kept = again if _may_fit(question, grid, streams) or "mbs" in question.fixed else again[-1:]
        sizes: dict[str, Any] = {name: getattr(grid, name) for name in Candidate.__slots__}  # twice as fast as replace
        for (ep, etp), zero in itertools.product(_expert_axes(question, grid), sharded):
            own = sizes | {"ep": ep, "etp": etp, "zero": zero}
            all_copies = copies_of_shards(question, Candidate(**own))
            for recompute, copies, precision in itertools.product(kept, all_copies, formats):
                layout = Candidate(**own | {"recompute": recompute, "copies": copies, "precision": precision})
                if zero <= 1 or question.can_shard(layout):
                    yield layout


def copies_of_shards(question: PlanRequest, layout: Candidate) -> list[int]:
    """HSDP: one copy; and as many as keep each within a domain of the scale-up links, where gathers are fast."""
    ranks, domain = layout.dp * layout.cp, question.cluster.fabric.scale_up_domain
    near = max((size for size in _divisors(ranks) if size * layout.tp <= domain), default=1)
    tried = sorted({1, ranks // near if near > 1 else 1}) if layout.zero > 1 else [1]
    experts = layout.tp * ranks // (layout.ep * layout.etp)
    asked = question.choices("copies", tried)
    return [copies for copies in asked if ranks % copies == experts % copies == 0 and (layout.zero > 1 or copies == 1)]


def _formats(question: PlanRequest) -> list[str]:
    if "precision" not in question.fixed:
        return precisions(question.cluster)
    return [name for name in computable(question.cluster) if name == question.fixed["precision"]]


def _recomputations(shape: GPTShape) -> list[Recompute]:
    if not ATTENTION_AND_MLP.issuperset(shape.blocks):
        return ["none", "full"]  # of hybrids' memory nothing else is known (models/costs/mixers.py)
    if all(shape.moe_blocks):
        return ["none", "moe", "full"]
    mlp: list[Recompute] = [] if shape.add_bias_linear else ["mlp"]  # training/config/incompatible.py says why
    moe: list[Recompute] = ["moe"] if shape.num_moe_experts else []
    return ["none", *moe, *mlp, "full"]


def _grids(question: PlanRequest) -> Iterator[Candidate]:
    """Sizes of TP, CP, PP and DP, microbatches, and stages."""
    shape, world, batch = question.shape, question.num_gpus, question.global_batch_size
    for tp in question.choices("tp", _tensor_sizes(question)):
        for cp in question.choices("cp", _context_sizes(question)):
            if world % (tp * cp) or not _divides(question.model, shape, tp, cp, question.splits_sequences(tp)):
                continue
            for pp in question.choices("pp", _divisors(world // (tp * cp))):
                dp = world // (tp * cp * pp)
                if world % (tp * cp * pp) or pp > shape.num_layers or question.fixed.get("dp", dp) != dp:
                    continue
                pieces, overlap = question.splits_sequences(tp), question.overlaps(dp * cp)
                base = Candidate(tp=tp, cp=cp, pp=pp, dp=dp, sequence_parallel=pieces, overlap=overlap)
                for mbs in question.choices("mbs", _micro_batches(question, base)):
                    if batch % (dp * mbs) == 0:
                        sized = dataclasses.replace(base, mbs=mbs, microbatches=batch // (dp * mbs))
                        yield from _staged(question, shape, sized)


def _staged(question: PlanRequest, shape: GPTShape, base: Candidate) -> Iterator[Candidate]:
    """Interleaving needs a whole number of rounds of PP microbatches."""
    for stages in stage_choices(shape.num_layers, base.pp, shape.mtp_num_layers, _head_blocks(shape)):
        if question.fixed.get("vpp", stages.vpp) != stages.vpp or (stages.vpp > 1 and base.microbatches % base.pp):
            continue
        yield dataclasses.replace(base, **dataclasses.asdict(stages))


@cache
def _head_blocks(shape: GPTShape) -> float:
    """Blocks that multiply as much as the output layer and the depths of multi-token prediction do."""
    depths, logits = shape.mtp_num_layers, 2 * shape.hidden_size * shape.vocab_size
    rest = flops_per_token(shape, 1) / 3 - (1 + depths) * logits
    return depths + (1 + depths) * logits / (rest / (shape.num_layers + depths))


def _micro_batches(question: PlanRequest, base: Candidate) -> list[int]:
    """Doubled until the batch ends, until one microbatch cannot fit, or until products gain nothing any more."""
    whole, each = question.global_batch_size // base.dp, question.seq_length * question.shape.hidden_size
    most = min(whole, max(USUAL_MICRO_BATCH, LARGE * base.cp // each))
    sizes = [2**power for power in range(most.bit_length())]
    return [size for size in sizes if size == 1 or _may_fit(question, dataclasses.replace(base, mbs=size), 1)]


def _may_fit(question: PlanRequest, layout: Candidate, streams: int) -> bool:
    """Whether the least that a stage keeps of its microbatches fits: so many hidden states a block; or the logits.

    The second stage's are counted: as many microbatches as there are stages after the first.
    """
    shape, pp = question.shape, layout.pp
    tokens = question.seq_length * layout.mbs / (layout.tp * layout.cp)
    microbatches = min(max(1, pp - 1), question.global_batch_size // (layout.dp * layout.mbs))
    states = streams * shape.hidden_size * shape.num_layers / pp * microbatches
    room = SAFE_SHARE * question.cluster.gpu.memory_gib * 2**30
    return 2 * tokens * max(states, shape.vocab_size) <= room


def _tensor_sizes(question: PlanRequest) -> list[int]:
    """Up to a node, or to sixteen where more GPUs share scale-up links: beyond, the network carries every layer."""
    cluster = question.cluster
    most = max(cluster.node.gpus_per_node, min(cluster.fabric.scale_up_domain, 16))
    return [size for size in _divisors(question.num_gpus) if size <= most]


def _context_sizes(question: PlanRequest) -> list[int]:
    length = question.seq_length
    piece = SMALLEST_PIECE if length >= LONG else SMALLEST_OF_SHORT
    return [1, *(2**power for power in range(1, 7) if length >= piece * 2**power)]


@cache
def _divides(model: ModelConfig, shape: GPTShape, tp: int, cp: int, pieces: bool) -> bool:
    """pieces: under sequence parallelism."""
    parallel = ParallelConfig(tensor_model_parallel_size=tp, sequence_parallel=pieces, context_parallel_size=cp)
    return not (
        divisibility.split_problems(shape, tp)
        or divisibility.latent_problems(shape, tp)
        or divisibility.sequence_problems(model, shape, parallel)
        or divisibility.context_problems(shape, parallel)
    )


def _expert_axes(question: PlanRequest, grid: Candidate) -> list[tuple[int, int]]:
    """EP and ETP within a stage's ranks. Both at once, unless --etp asks, only with the largest EP: with a smaller one
    a rank holds no less than with more EP alone. In seven questions no other combination was over 0.3 % faster
    (2026-11-22)."""
    shape, ranks = question.shape, grid.tp * grid.cp * grid.dp
    if not shape.num_moe_experts:
        return [(1, 1)] if all(question.fixed.get(name, 1) == 1 for name in ("ep", "etp")) else []
    sizes = [ep for ep in question.choices("ep", _divisors(shape.num_moe_experts)) if ranks % ep == 0]
    found = []
    for ep in sizes:
        for etp in question.choices("etp", sorted({1, grid.tp}) if ep in (1, sizes[-1]) else [1]):
            if ranks % (ep * etp) == 0 and not _expert_problems(shape, grid.tp, ep, etp, grid.sequence_parallel):
                found.append((ep, etp))
    return found


@cache
def _expert_problems(shape: GPTShape, tp: int, ep: int, etp: int, pieces: bool) -> bool:
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp, sequence_parallel=pieces, expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )  # fmt: skip
    return bool(divisibility.expert_problems(shape, parallel))


@cache
def _divisors(number: int) -> list[int]:
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})
