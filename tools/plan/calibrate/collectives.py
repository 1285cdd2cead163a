"""Bus bandwidth of each collective over several sizes, within a node and between nodes. Needs torch.

Bus bandwidth as NVIDIA's nccl-tests define it (doc/PERFORMANCE.md there): what each rank's link carries, whatever the
number of ranks, so that it compares with a link's datasheet.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from tools.plan.calibrate.measure import middle_s

Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send and receive"]
Over = Literal["node", "nodes", "one link"]
"""node: the ranks of one node, all nodes at once. nodes: one rank of each node in a group, all groups at once, so that
all adapters are at work. one link: the first of these groups alone."""

OPERATIONS: tuple[Operation, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send and receive")
BYTES = {"cuda": (2**10, 2**16, 2**20, 2**23, 2**26, 2**28), "cpu": (2**10, 2**14, 2**17, 2**20, 2**23)}
"""Of the whole buffer: what all ranks hold together before an all-gather, what each reduces in an all-reduce."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Collective:
    """One operation at one size; the slowest rank's time."""

    operation: Operation
    over: Over
    ranks: int
    bytes: int
    us: float
    gb_per_s: float
    """Bus bandwidth."""


def curves(device: torch.device, node: str, local_rank: int) -> list[Collective]:
    """Over all ranks' nodes; the same on every rank. node: this rank's, by name; torch.distributed must be up."""
    places: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(places, (node, local_rank))
    found = []
    for over, groups in _groups(places).items():
        mine = next(
            (handle for ranks, handle in [(ranks, dist.new_group(ranks)) for ranks in groups] if _member(ranks)), None
        )
        sizes = BYTES[device.type] if len(groups[0]) > 1 else ()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # names that torch 2.13 would replace by ones it alone has
            for operation in OPERATIONS:
                found += [_measured(operation, over, len(groups[0]), size, mine, device) for size in sizes]
    return found


def _groups(places: Sequence[tuple[str, int]]) -> dict[Over, list[list[int]]]:
    """Ranks of every group, by what they reach each other over. Where there is one node, that is all."""
    nodes = list(dict.fromkeys(node for node, _ in places))
    within = [[rank for rank, (node, _) in enumerate(places) if node == name] for name in nodes]
    if len(nodes) == 1:
        return {"node": within}
    numbers = sorted({number for _, number in places})
    across = [[rank for rank, (_, number) in enumerate(places) if number == own] for own in numbers]
    return {"node": within, "nodes": [ranks for ranks in across if len(ranks) == len(nodes)], "one link": [across[0]]}


def _member(ranks: Sequence[int]) -> bool:
    return dist.get_rank() in ranks


def _measured(
    operation: Operation, over: Over, ranks: int, size: int, group: dist.ProcessGroup | None, device: torch.device
) -> Collective:
    """All ranks leave with the slowest one's time; those of no group only wait for it."""
    seconds = torch.zeros(1, dtype=torch.float64, device=device)
    dist.barrier()
    if group is not None:
        seconds += middle_s(_work(operation, size, group, device), device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    share = {"all_reduce": 2 * (ranks - 1) / ranks, "send and receive": 1.0}.get(operation, (ranks - 1) / ranks)
    rate = size * share / float(seconds) / 1e9
    us = float(seconds) * 1e6
    return Collective(operation=operation, over=over, ranks=ranks, bytes=size, us=us, gb_per_s=rate)


def _work(operation: Operation, size: int, group: dist.ProcessGroup, device: torch.device) -> Callable[[], Any]:
    """One call of the operation on a buffer of ``size`` bytes, less what does not divide among the ranks."""
    ranks = dist.get_world_size(group)
    each = max(1, size // 4 // ranks)
    whole, part = torch.ones(each * ranks, device=device), torch.ones(each, device=device)
    target = torch.zeros_like(whole)
    calls: dict[Operation, Callable[[], Any]] = {
        "all_gather": lambda: dist.all_gather_into_tensor(target, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_reduce": lambda: dist.all_reduce(target, group=group),
        "all_to_all": lambda: dist.all_to_all_single(target, whole, group=group),
        "send and receive": lambda: _around(whole, target, group),
    }
    return calls[operation]


def _around(whole: torch.Tensor, target: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Every rank sends to the next one of its group, as stages of a pipeline do at once in both directions."""
    ranks = dist.get_process_group_ranks(group)
    at = ranks.index(dist.get_rank())
    following, before = ranks[(at + 1) % len(ranks)], ranks[at - 1]
    sends = [dist.P2POp(dist.isend, whole, following, group), dist.P2POp(dist.irecv, target, before, group)]
    for request in dist.batch_isend_irecv(sends):
        request.wait()
