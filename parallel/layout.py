"""Sizes -> a checked ``Layout``: rank numbers and their coordinates on the process grid.

The grid is one array of ranks with Megatron's axis order (fastest first: TP, CP, DP, PP), so a rank is

    rank = tp + TP * (cp + CP * (dp + DP * pp))

Ranks that share a layer's matrices (TP) are neighbours, hence on one node; stages are farthest apart.
"""

import math
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from parallel.config import ParallelConfig
from parallel.launch import MOST_RANKS
from program.schema import Range

Size = Annotated[int, Range(1, MOST_RANKS)]


class Coordinates(NamedTuple):
    """Where a rank stands on the process grid."""

    dp: int
    pp: int
    cp: int
    tp: int


@dataclass(kw_only=True, slots=True, frozen=True)
class Layout:
    """The sizes of every axis. ``dp`` is what TP x CP x PP leaves of the world."""

    tp: Size = 1
    cp: Size = 1
    pp: Size = 1
    ep: Size = 1
    etp: Size = 1
    dp: Size = 1
    vpp: Size = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def edp(self) -> int:
        """Ranks that hold the same experts: within a pipeline stage, what EP x ETP leaves of TP x CP x DP."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    @property
    def chunks(self) -> int:
        """Pieces the stack of layers is cut into."""
        return self.pp * self.vpp

    def coordinates(self, rank: int) -> Coordinates:
        """Axis positions of ``rank``."""
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coordinates(dp=dp, pp=pp, cp=cp, tp=tp)

    def rank(self, at: Coordinates) -> int:
        """Inverse of ``coordinates``."""
        return at.tp + self.tp * (at.cp + self.cp * (at.dp + self.dp * at.pp))

    def __str__(self) -> str:
        sizes = [
            ("TP", self.tp),
            ("CP", self.cp),
            ("PP", self.pp),
            ("VPP", self.vpp),
            ("EP", self.ep),
            ("ETP", self.etp if self.ep > 1 else 1),
            ("DP", self.dp),
        ]
        named = [f"{name} {size}" for name, size in sizes if size > 1 or name in ("TP", "PP", "DP")]
        return " x ".join(named)


def replica_size(parallel: ParallelConfig) -> int:
    """Ranks that hold one copy of the model."""
    return parallel.tensor_model_parallel_size * parallel.context_parallel_size * parallel.pipeline_model_parallel_size


def smallest_world(parallel: ParallelConfig) -> int:
    """The fewest ranks that the sizes fit: one replica of the model, or more where the experts need more ranks."""
    dense = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    return math.lcm(dense, expert_replica_size(parallel)) * parallel.pipeline_model_parallel_size


def world_problems(parallel: ParallelConfig, world_size: int) -> list[str]:
    """Whether ``world_size`` ranks can be divided into whole replicas, and expert groups."""
    replica = replica_size(parallel)
    if world_size < 1 or world_size % replica:
        below, above = world_size // replica * replica, -(-world_size // replica) * replica or replica
        sizes = " or ".join(str(size) for size in sorted({below, above}) if size > 0)
        return [
            f"parallel: {world_size} ranks cannot be split into replicas of "
            f"TP {parallel.tensor_model_parallel_size} x CP {parallel.context_parallel_size} x "
            f"PP {parallel.pipeline_model_parallel_size} = {replica} ranks. Launch {sizes} ranks, or change "
            "parallel.tensor_model_parallel_size, .context_parallel_size or .pipeline_model_parallel_size."
        ]
    stage, experts = world_size // parallel.pipeline_model_parallel_size, expert_replica_size(parallel)
    if stage % experts:
        fits = [size for size in range(1, stage + 1) if stage % size == 0]
        return [
            f"parallel: the {stage} ranks of a pipeline stage (TP x CP x DP) cannot be split into replicas of the "
            f"experts, EP {parallel.expert_model_parallel_size} x ETP {expert_tensor_parallel_size(parallel)} = "
            f"{experts} ranks. Change parallel.expert_model_parallel_size or .expert_tensor_parallel_size: their "
            f"product must be one of {', '.join(map(str, fits))}."
        ]
    return _copies_problems(parallel, stage // parallel.tensor_model_parallel_size, stage // experts)


def _copies_problems(parallel: ParallelConfig, ranks: int, expert_ranks: int) -> list[str]:
    """Whether the ranks that share weights, and those that share experts, can be split into HSDP's copies."""
    copies = parallel.num_distributed_optimizer_instances
    if ranks % copies == 0 and expert_ranks % copies == 0:
        return []
    fits = [size for size in range(1, ranks + 1) if ranks % size == 0 and expert_ranks % size == 0]
    return [
        f"parallel.num_distributed_optimizer_instances {copies}: the {ranks} ranks of DP x CP, and the {expert_ranks} "
        f"that hold the same experts, cannot be split into so many. Use one of {', '.join(map(str, fits))}."
    ]


def expert_tensor_parallel_size(parallel: ParallelConfig) -> int:
    """Ranks that share each expert's matrices. Not set: TP."""
    return parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size


def expert_replica_size(parallel: ParallelConfig) -> int:
    """Ranks of a pipeline stage that hold one copy of its experts."""
    return parallel.expert_model_parallel_size * expert_tensor_parallel_size(parallel)


def layout_of(parallel: ParallelConfig, world_size: int) -> Layout:
    """The layout of ``world_size`` ranks, which ``world_problems`` must have passed."""
    return Layout(
        tp=parallel.tensor_model_parallel_size,
        cp=parallel.context_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        ep=parallel.expert_model_parallel_size,
        etp=expert_tensor_parallel_size(parallel),
        dp=world_size // replica_size(parallel),
        vpp=parallel.virtual_pipeline_model_parallel_size or 1,
    )


def bubble(layout: Layout, microbatches: int) -> float:
    """Idle time of a pipeline rank over its computing time, (p - 1) / (v m): arXiv:2104.04473, section 2.2."""
    return (layout.pp - 1) / (layout.vpp * microbatches)
