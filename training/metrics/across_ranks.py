"""Numbers that each rank has of its own: gathered once a logged line, and made one as the registry says."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from parallel.groups import Ranks
from training.metrics import node
from training.metrics.nvml import GpuSensor
from training.metrics.registry import METRICS
from training.metrics.values import Value

HOLDERS = {"memory_gib": "memory_rank", "gpu_temperature_c": "gpu_temperature_rank"}
"""Metric -> the one that says which rank its largest value is of."""


class RankSensors:
    """Memory of this rank's device and process, its GPU by NVML, and, on one rank of a node, the node's network."""

    def __init__(self, ranks: Ranks) -> None:
        self.cuda = ranks.device if ranks.device.type == "cuda" else None
        self.gpu = GpuSensor(str(torch.cuda.get_device_properties(self.cuda).uuid)) if self.cuda else None
        self.network = node.Network() if ranks.identity.local_rank == 0 else None

    def read(self) -> dict[str, float]:
        """The same names on every rank; NaN where this rank has no value."""
        values = node.memory()
        values |= self.network.read() if self.network else dict.fromkeys(node.Network.NAMES, math.nan)
        if self.gpu is not None:
            values["memory_gib"] = torch.cuda.max_memory_allocated(self.cuda) / 2**30
            values |= self.gpu.read()
        return values


def across_ranks(own: Mapping[str, float], ranks: Ranks) -> dict[str, Value]:
    """Each metric over all ranks, by its reduction in the registry; NaN does not count, and what is NaN everywhere is
    left out. own: the same names on every rank. Collective: one all-gather of a number per name and rank; waits."""
    mine = torch.tensor(list(own.values()), dtype=torch.float64, device=ranks.device)
    all_ranks = torch.empty(ranks.layout.world_size * len(own), dtype=torch.float64, device=ranks.device)
    dist.all_gather_into_tensor(all_ranks, mine)
    return reduced(dict(zip(own, all_ranks.view(-1, len(own)).T.tolist(), strict=True)))


def reduced(by_rank: Mapping[str, Sequence[float]]) -> dict[str, Value]:
    """Name -> one value from those of all ranks, in the order of ranks."""
    values: dict[str, Value] = {}
    for name, column in by_rank.items():
        if known := [one for one in column if not math.isnan(one)]:
            values[name] = REDUCE[METRICS[name].reduce](known)
            if name in HOLDERS:
                values[HOLDERS[name]] = column.index(max(known))
    return values


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


REDUCE: dict[str, Callable[[Sequence[float]], float]] = {"mean": _mean, "sum": math.fsum, "max": max, "min": min}
