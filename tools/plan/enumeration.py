"""Every legal layout. Whether one is legal, the program's own checks say (``training.divisions``). No torch here."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal, cast

from models.config import ModelConfig
from models.shapes import GPTShape
from parallel.config import ParallelConfig
from parallel.stages import stage_problems
from tools.plan.machine import precisions
from tools.plan.question import Question
from training.divisions import expert_problems, latent_problems, sequence_problems, split_problems
from training.memory.layouts import Candidate, Recompute, Zero
from training.memory.states import parallel_config

MOST_MICRO_BATCH = 8
MOST_VPP = 16
SMALLEST_PIECE = 1024
"""Tokens of a sequence on one context rank: below, attention's products are too small to be worth a ring."""

Split = Literal["even", "embedding_and_loss", "loss", "ends"]


@dataclass(slots=True, frozen=True)
class Stages:
    """How blocks are dealt to pipeline stages."""

    vpp: int = 1
    split: Split = "even"
    first_layers: int = 0
    last_layers: int = 0


def candidates(question: Question) -> list[Candidate]:
    """All of them, in the order of their sizes."""
    return list(_candidates(question))


def _candidates(question: Question) -> Iterator[Candidate]:
    shape = question.shape
    formats = [name for name in precisions(question.cluster) if question.fixed.get("precision", name) == name]
    again = [name for name in _recomputations(shape) if question.fixed.get("recompute", name) == name]
    rest = list(itertools.product(again, cast(list[Zero], question.choices("zero", [1, 3])), formats))
    for grid in _grids(question):
        for ep, etp in _expert_axes(question, grid):
            for recompute, zero, precision in rest:
                yield dataclasses.replace(grid, ep=ep, etp=etp, recompute=recompute, zero=zero, precision=precision)


def _recomputations(shape: GPTShape) -> list[Recompute]:
    if all(shape.moe_blocks):
        return ["none", "moe", "full"]
    mlp: list[Recompute] = [] if shape.add_bias_linear else ["mlp"]  # training/combinations.py says why
    moe: list[Recompute] = ["moe"] if shape.num_moe_experts else []
    return ["none", *moe, *mlp, "full"]


def _grids(question: Question) -> Iterator[Candidate]:
    """Sizes of TP, CP, PP and DP, microbatches, and stages."""
    shape, world, batch = question.shape, question.num_gpus, question.global_batch_size
    for tp in question.choices("tp", _tensor_sizes(question)):
        for cp in question.choices("cp", _context_sizes(question)):
            if not _divides(question.model, shape, tp, cp) or world % (tp * cp):
                continue
            for pp in question.choices("pp", _divisors(world // (tp * cp))):
                if world % (tp * cp * pp) or pp > shape.num_layers:
                    continue
                dp = world // (tp * cp * pp)
                for mbs in question.choices("mbs", [1, 2, 4, MOST_MICRO_BATCH]):
                    if batch % (dp * mbs) == 0 and question.fixed.get("dp", dp) == dp:
                        base = Candidate(
                            tp=tp, cp=cp, pp=pp, dp=dp, mbs=mbs, microbatches=batch // (dp * mbs),
                            sequence_parallel=tp > 1, overlap=dp * cp > 1,
                        )  # fmt: skip
                        yield from _staged(question, shape, base)


def _staged(question: Question, shape: GPTShape, base: Candidate) -> Iterator[Candidate]:
    """Interleaving needs a whole number of rounds of PP microbatches."""
    for stages in stage_choices(shape.num_layers, base.pp, shape.mtp_num_layers):
        if question.fixed.get("vpp", stages.vpp) != stages.vpp or (stages.vpp > 1 and base.microbatches % base.pp):
            continue
        yield dataclasses.replace(base, **dataclasses.asdict(stages))


@cache
def stage_choices(layers: int, pp: int, depths: int = 0) -> tuple[Stages, ...]:
    """Equal stages, and those in which embedding and loss, or the loss, count as a block; else uneven ends."""
    if pp == 1:
        return (Stages(),)
    found = []
    extras: tuple[tuple[Split, int, int], ...] = (("even", 0, 0), ("embedding_and_loss", 1, 1), ("loss", 0, 1))
    for split, first, last in extras:
        whole = layers + first + last
        if whole % pp or whole // pp < 1 + (split != "even"):
            continue
        share = whole // pp
        for vpp in (size for size in _divisors(share) if size <= MOST_VPP and (share // size > 1 or split == "even")):
            found.append(Stages(vpp, split, share - first if first + last else 0, share - last if last else 0))
    if not found and pp > 2 and (uneven := _uneven_ends(layers, pp)):
        found.append(uneven)
    return tuple(stages for stages in found if not _stage_problems(layers, pp, stages, depths))


def _uneven_ends(layers: int, pp: int) -> Stages | None:
    """Stages between get as many as they must; the last, which computes the loss, the fewest."""
    middle = math.ceil(layers / pp)
    rest = layers - (pp - 2) * middle
    return Stages(1, "ends", rest - rest // 2, rest // 2) if rest >= 2 else None


def _stage_problems(layers: int, pp: int, stages: Stages, depths: int) -> list[str]:
    layout = Candidate(pp=pp, **dataclasses.asdict(stages))
    return stage_problems(parallel_config(layout), layers, depths)


def _tensor_sizes(question: Question) -> list[int]:
    """Up to a node, or to sixteen where more GPUs share scale-up links: beyond, the network carries every layer."""
    cluster = question.cluster
    most = max(cluster.node.gpus_per_node, min(cluster.fabric.scale_up_domain, 16))
    return [size for size in _divisors(question.num_gpus) if size <= most]


def _context_sizes(question: Question) -> list[int]:
    most = max(1, question.seq_length // SMALLEST_PIECE)
    return [1, *(2**power for power in range(1, 7) if 2**power <= most and question.seq_length >= 8192)]


@cache
def _divides(model: ModelConfig, shape: GPTShape, tp: int, cp: int) -> bool:
    parallel = ParallelConfig(tensor_model_parallel_size=tp, sequence_parallel=tp > 1, context_parallel_size=cp)
    return not (
        split_problems(model, shape, tp) or latent_problems(shape, tp) or sequence_problems(model, shape, parallel)
    )


def _expert_axes(question: Question, grid: Candidate) -> list[tuple[int, int]]:
    """EP and ETP within a stage's ranks; experts are cut by TP only where whole ones do not go round."""
    shape, ranks = question.shape, grid.tp * grid.cp * grid.dp
    if not shape.num_moe_experts:
        return [(1, 1)] if all(question.fixed.get(name, 1) == 1 for name in ("ep", "etp")) else []
    found = []
    for ep in question.choices("ep", _divisors(shape.num_moe_experts)):
        for etp in question.choices("etp", sorted({1, grid.tp}) if ep == 1 else [1]):
            if ranks % (ep * etp) == 0 and not _expert_problems(shape, grid.tp, ep, etp):
                found.append((ep, etp))
    return found


@cache
def _expert_problems(shape: GPTShape, tp: int, ep: int, etp: int) -> bool:
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp, sequence_parallel=tp > 1, expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )  # fmt: skip
    return bool(expert_problems(shape, parallel))


@cache
def _divisors(number: int) -> list[int]:
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})
