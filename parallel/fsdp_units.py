"""Which modules of a model chunk fully_shard gathers together, over which ranks, and what it gathers ahead."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from parallel.config import ParallelConfig, PrecisionConfig
from parallel.groups import Ranks
from parallel.precision import params_dtype

SUBLAYERS = 2
"""Of a block: attention, then an MLP or experts. Gathered together, they need half as many collectives."""


class ShardRanks(NamedTuple):
    """The ranks that a kind of parameter is cut over, and this rank's place among them."""

    mesh: DeviceMesh
    size: int
    rank: int
    is_main: bool
    """Not of HSDP's other copies."""

    def rows(self, count: int) -> tuple[int, int]:
        """First row, and number of rows, of this rank's shard of ``count`` rows: torch.chunk's, some have none."""
        most = -(-count // self.size)
        first = min(self.rank * most, count)
        return first, min(most, count - first)


class Sharded(NamedTuple):
    """The ranks of dense parameters, and those of experts, which EP and ETP leave."""

    dense: ShardRanks
    expert: ShardRanks

    def of(self, param: Tensor) -> ShardRanks:
        """Whose a parameter is, by Megatron's mark on it."""
        return self.dense if getattr(param, "allreduce", True) else self.expert


def sharded_over(ranks: Ranks, copies: int) -> Sharded:
    """copies: HSDP's."""
    pgs = ranks.pgs
    return Sharded(
        _shard_ranks(pgs.dp_cp, pgs.intra_dp_cp, ranks, copies),
        _shard_ranks(pgs.expt_dp, pgs.intra_expt_dp, ranks, copies),
    )


def _shard_ranks(whole: dist.ProcessGroup, shards: dist.ProcessGroup, ranks: Ranks, copies: int) -> ShardRanks:
    device = ranks.device.type
    if copies == 1:
        return ShardRanks(DeviceMesh.from_group(whole, device), whole.size(), whole.rank(), True)
    # The same ranks for experts and the rest: instances are consecutive ranks of a stage in both grids.
    replicas = ranks.pgs.inter_dist_opt
    numbers = torch.tensor(dist.get_process_group_ranks(whole)).view(copies, -1)
    mesh = DeviceMesh.from_group([replicas, shards], device, mesh=numbers, mesh_dim_names=("replicate", "shard"))
    return ShardRanks(mesh, shards.size(), shards.rank(), replicas.rank() == 0)


def shard(
    root: nn.Module,
    chunk: MegatronModule,
    parallel: ParallelConfig,
    precision: PrecisionConfig,
    over: Sharded,
    offload: OffloadPolicy,
) -> list[FSDPModule]:
    """Cut the parameters of ``root``, which is around ``chunk``: one module of each unit, the root's first, the others
    in the order of a forward pass."""
    resharded = parallel.sharding == "optim_grads_params"
    how: dict[str, Any] = {"mp_policy": _policy(precision), "offload_policy": offload}
    groups: list[list[Any]] = []  # of FSDPModule, which fully_shard makes them
    for modules in _units(chunk, _unit_size(chunk, parallel.num_distributed_optimizer_instances)):
        experts = [inner for module in modules for inner in _experts_apart(module)]
        for inner in experts:  # before what they are in
            fully_shard(inner, mesh=over.expert.mesh, reshard_after_forward=resharded, **how)
        # The backward pass begins with the output layer: it stays whole, unless other microbatches come in between.
        kept = modules[0] is getattr(chunk, "output_layer", None) and parallel.pipeline_model_parallel_size == 1
        fully_shard(modules, mesh=over.dense.mesh, reshard_after_forward=resharded and not kept, **how)
        groups.append([modules[0], *experts])
    groups.insert(0, [fully_shard(root, mesh=over.dense.mesh, reshard_after_forward=False, **how)])
    units = [unit for group in groups for unit in group]
    for unit in units:
        unit.set_gradient_divide_factor(1.0)  # sums: Triplane divides by tokens
        unit.set_force_sum_reduction_for_comms(True)
    if chunk.pre_process and len(groups) > 1 and groups[1][0] is chunk.embedding:
        chunk.embedding.set_unshard_in_backward(False)  # a gradient of rows needs no weight
    _gather_ahead(groups)
    return units


def _policy(precision: PrecisionConfig) -> MixedPrecisionPolicy:
    """Shards are fp32; in 16 bits they are rounded before they are gathered, and gradients widened before their sum."""
    if precision.dtype == "fp32":
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(
        param_dtype=params_dtype(precision),
        reduce_dtype=torch.float32 if precision.grad_reduce_in_fp32 else params_dtype(precision),
        cast_forward_inputs=False,  # Megatron's Float16Module does, and leaves rotary angles in fp32
    )


def _unit_size(chunk: MegatronModule, copies: int) -> int:
    """Sublayers of a unit. Where fewer are recomputed at a time, each of their backward passes reduces its part of a
    unit by itself, which torch 2.13 cannot add up over microbatches for HSDP's copies."""
    config = chunk.config
    if copies == 1 or config.recompute_granularity != "full":
        return SUBLAYERS
    return 1 if config.recompute_method == "block" else math.gcd(SUBLAYERS, config.recompute_num_layers)


def _units(chunk: MegatronModule, size: int) -> Iterator[list[nn.Module]]:
    """Modules to gather together, in the order of a forward pass: ``size`` sublayers. The root keeps the rest.

    Tied embeddings stay with it: the output layer reads their weight from outside of the module that holds it.
    """
    tied = chunk.share_embeddings_and_output_weights
    if chunk.pre_process and not tied:
        yield [chunk.embedding]
    layers = list(chunk.decoder.layers)
    for first in range(0, len(layers), size):
        yield layers[first : first + size]
    if chunk.mtp_process:
        yield from ([depth] for depth in chunk.mtp.layers)
    if chunk.post_process and not tied:
        yield [chunk.output_layer]


def _experts_apart(module: nn.Module) -> list[nn.Module]:
    """The experts in it that are cut over other ranks than the rest of it."""
    found = [experts for inner in module.modules() if (experts := getattr(inner, "experts", None)) is not None]
    return [one for one in found if any(not getattr(param, "allreduce", True) for param in one.parameters())]


def _gather_ahead(groups: list[list[FSDPModule]]) -> None:
    """While a unit computes, the next one is gathered, in both directions; experts come after what they are in in both.

    Said once: what fully_shard finds out by itself, the order of the last forward pass, is wrong in a pipeline, and
    where layers are recomputed. The last one is followed by itself, which is no gather, lest it looks for another.
    """
    root, *rest = groups
    forward = [unit for group in groups for unit in group]
    backward = [unit for group in (root, *reversed(rest)) for unit in group]
    for unit, following in zip(forward, [*forward[1:], forward[-1]], strict=True):
        unit.set_modules_to_forward_prefetch([following])
    for unit, following in zip(backward, [*backward[1:], backward[-1]], strict=True):
        unit.set_modules_to_backward_prefetch([following])
