"""Muon's step beside megatron-core's AdamW, on what its optimizers hold: shards, copies, or the weights themselves.

Momentum is kept as Adam's moments are: a tensor beside each shard, of its shape. Only what is to be orthogonalized
travels: each matrix is collected on one rank of data parallelism, and of those that cut it for tensor parallelism,
where Newton-Schulz has the whole of it; its update goes back the same way ("Distributed Muon" of arXiv:2502.16982, with
the work dealt). Of each element that a rank updates, 4 bytes each way for either kind of parallelism.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from emerging_optimizers.orthogonalized_optimizers import get_muon_scale_factor
from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz
from emerging_optimizers.utils import fp32_matmul_precision
from torch import Tensor

from training.config.optimizer_config import OptimizerConfig
from training.muon.dealing import FlatRange, Group, collect, give_back, rank_in, rounds, size_of
from training.muon.matrices import MatrixParameter, elements

MOMENTUM = "momentum_buffer"
"""Of Muon's state: its name in the package emerging-optimizers."""


@dataclass(slots=True, frozen=True)
class MomentumShard:
    """This rank's elements of a parameter, where its optimizer has them."""

    main: Tensor
    """fp32; its gradient is clipped."""
    momentum: Tensor
    group: Mapping[str, Any]
    """``lr`` and ``weight_decay`` of this step."""


@dataclass(slots=True, frozen=True)
class Domain:
    """Parameters whose elements lie on the same ranks: the dense ones, or the experts'."""

    parameters: Sequence[MatrixParameter]
    spans: Sequence[Sequence[FlatRange]]
    """Of each parameter, what each rank of ``data`` holds of this TP rank's part."""
    shards: Sequence[MomentumShard | None]
    """Of each parameter, this rank's; None where it has no element of it."""
    data: Group
    """Ranks that hold different elements; None where each holds all of them."""
    tensor: dist.ProcessGroup
    device: torch.device


@torch.no_grad()
def update(domains: Sequence[Domain], config: OptimizerConfig) -> None:
    """Update Muon's parameters with the gradients that are there, and take these away: Adam's step is none of theirs.

    Collective over the ranks of a pipeline stage.
    """
    with fp32_matmul_precision(config.muon_fp32_matmul_prec):
        for domain in domains:
            for number, change in _changes(domain, config):
                _apply(domain.shards[number], change)
    for shard in (shard for domain in domains for shard in domain.shards if shard is not None):
        shard.main.grad = None


def _changes(domain: Domain, config: OptimizerConfig) -> Iterator[tuple[int, Tensor]]:
    """(number of a parameter, this rank's elements of its orthogonalized momentum)."""
    like = torch.empty(0, device=domain.device)

    def direction(number: int) -> Tensor:
        shard = domain.shards[number]
        return like if shard is None else _direction(shard, config)

    queue = list(rounds([one.cost for one in domain.parameters], size_of(domain.data)))
    for batch in itertools.batched(queue, domain.tensor.size()):
        parts = [collect(dealt, domain.spans, direction, domain.data, like) for dealt in batch]
        mine = {
            number: part
            for dealt, part in zip(batch, parts, strict=True)
            if (number := dealt[rank_in(domain.data)]) is not None and part is not None
        }
        updates = _orthogonal(domain, mine, config, like)
        for dealt in batch:
            number = dealt[rank_in(domain.data)]
            whole = None if number is None else updates[number]
            yield from give_back(dealt, domain.spans, whole, domain.data, like)


def _orthogonal(
    domain: Domain, parts: Mapping[int, Tensor], config: OptimizerConfig, like: Tensor
) -> Mapping[int, Tensor]:
    """This TP rank's part of each update, by number, of its part of each momentum. No more than there are TP ranks:
    each has one parameter whole; one that is not cut is orthogonalized on all of them."""
    group, rank = domain.tensor, domain.tensor.rank()
    found = {
        number: one.part(_step(one, [part], config), rank)
        for number, part in parts.items()
        if not (one := domain.parameters[number]).is_cut
    }
    cut = [number for number in parts if number not in found]
    if not cut:
        return found
    spans = {number: _spans_over_tensor(domain.parameters[number]) for number in cut}
    dealt = [*cut, *[None] * (group.size() - len(cut))]
    joined, mine = collect(dealt, spans, parts.__getitem__, group, like), dealt[rank]
    if joined is not None and mine is not None:
        one = domain.parameters[mine]
        whole = _step(one, [joined[span.start : span.end] for span in spans[mine]], config)
        joined = torch.cat([one.part(whole, each) for each in range(group.size())])
    return {**found, **dict(give_back(dealt, spans, joined, group, like))}


def _spans_over_tensor(one: MatrixParameter) -> list[FlatRange]:
    """What each TP rank holds, one behind the other."""
    ends = itertools.accumulate((elements(one, rank) for rank in range(len(one.parts))), initial=0)
    return list(itertools.starmap(FlatRange, itertools.pairwise(ends)))


def _step(one: MatrixParameter, parts: Sequence[Tensor], config: OptimizerConfig) -> Tensor:
    """Each matrix orthogonalized and scaled, [rows, columns] together."""
    return one.joined([_orthogonalized(matrix, config) for matrix in one.matrices(one.whole(parts))])


def _orthogonalized(matrix: Tensor, config: OptimizerConfig) -> Tensor:
    found = newton_schulz(matrix, config.muon_num_ns_steps, config.muon_coefficient_type)
    return found * get_muon_scale_factor(*matrix.shape, mode=config.muon_scale_mode) * config.muon_extra_scale_factor


def _direction(shard: MomentumShard, config: OptimizerConfig) -> Tensor:
    """Momentum, once this step's gradient is in it, flat; with Nesterov's look ahead where it is on."""
    gradient, momentum = shard.main.grad, shard.momentum
    assert gradient is not None, "a parameter of Muon's has no gradient"
    momentum.lerp_(gradient, 1 - config.muon_momentum)
    ahead = gradient.lerp(momentum, config.muon_momentum) if config.muon_nesterov else momentum
    return ahead.reshape(-1)


def _apply(shard: MomentumShard | None, change: Tensor) -> None:
    if shard is None:
        return
    rate, decay = shard.group["lr"], shard.group["weight_decay"]
    shard.main.add_(shard.main, alpha=-decay * rate)
    shard.main.add_(change.view_as(shard.main), alpha=-rate)
