"""Muon for this rank's chunks: whose each parameter is, and where megatron-core's optimizers have its elements."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.emerging_optimizers import _get_qkv_split_shapes
from torch import Tensor

from parallel import ddp
from parallel.config import ParallelConfig
from parallel.ddp import Chunks
from parallel.groups import Ranks
from parallel.regions import HeldTensor
from training.checkpoint.optimizer_state import MainParam, main_params, parts
from training.config.optimizer_config import OptimizerConfig
from training.muon.dealing import Group, Span
from training.muon.matrices import described, is_matrix
from training.muon.update import MOMENTUM, Domain, Shard, update
from training.optimizer_forms import MOMENTS

QKV = "linear_qkv.weight"


def install(
    optimizer: MegatronOptimizer, chunks: Chunks, config: OptimizerConfig, parallel: ParallelConfig, ranks: Ranks
) -> list[Domain]:
    """Let ``optimizer``, AdamW until now, update matrices by Muon. Collective, as each of its steps then is."""
    mains = dict(main_params(optimizer))
    groups = {main: group for part in parts(optimizer) for group in part.optimizer.param_groups for main in group["params"]}
    shards = {param: _shard(main, optimizer, groups) for param, main in mains.items() if is_matrix(param)}
    muons = [one for chunk in chunks for one in ddp.held(chunk) if one.tensor.requires_grad and is_matrix(one.tensor)]
    qkv = _get_qkv_split_shapes(chunks[0].config) if config.muon_split_qkv else []
    domains = []
    for is_expert in (False, True):
        own = [one for one in muons if _is_expert(one.tensor) == is_expert]
        if own:
            data = None if parallel.sharding == "no_shard" else data_group(ranks, parallel, is_expert)
            tensor = ranks.pgs.expt_tp if is_expert else ranks.pgs.tp
            domains.append(_domain(own, mains, shards, data, tensor, qkv, config.muon_split_fused, ranks.device))
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        part.state_names = state_names
    step = optimizer.step_with_ready_grads

    def step_with_ready_grads() -> bool:
        update(domains, config)
        return bool(step())

    optimizer.step_with_ready_grads = step_with_ready_grads
    return domains


def state_names(param: Tensor) -> Sequence[str]:
    """What is kept of a model's parameter."""
    return (MOMENTUM,) if is_matrix(param) else MOMENTS


def data_group(ranks: Ranks, parallel: ParallelConfig, is_expert: bool) -> dist.ProcessGroup:
    """Ranks that together hold all shards of a parameter once."""
    if parallel.num_distributed_optimizer_instances > 1:
        return ranks.pgs.intra_expt_dp if is_expert else ranks.pgs.intra_dp_cp
    return ranks.pgs.expt_dp if is_expert else ranks.pgs.dp_cp


def _is_expert(param: Tensor) -> bool:
    return not getattr(param, "allreduce", True)  # Megatron's mark


def _shard(main: MainParam, optimizer: MegatronOptimizer, groups: dict[Tensor, Any]) -> Shard:
    """With a momentum of zeros, which is where Adam's first step would look for its own state."""
    part = next(part for part in parts(optimizer) if any(main.tensor is one for group in part.optimizer.param_groups for one in group["params"]))
    momentum = torch.zeros_like(main.tensor, dtype=torch.float32)
    part.optimizer.state[main.tensor][MOMENTUM] = momentum
    return Shard(main.tensor, momentum, groups[main.tensor])


def _domain(
    held: Sequence[HeldTensor],
    mains: dict[Tensor, MainParam],
    shards: dict[Tensor, Shard],
    data: Group,
    tensor: dist.ProcessGroup,
    qkv: Sequence[int],
    split: bool,
    device: torch.device,
) -> Domain:
    found, own = [], []
    for one in held:
        key = one.regions[0].key
        fits = key.endswith(QKV) and qkv and one.regions[0].global_shape[-2] % sum(qkv) == 0
        found.append(described(key, one, tensor, qkv=qkv if fits else (), split=split))
        start = one.start + (mains[one.tensor].start if one.tensor in mains else 0)
        own.append(Span(start, start + mains[one.tensor].tensor.numel() if one.tensor in mains else start))
    spans: list[list[Span]] = [own]
    if data is not None:
        spans = [[] for _ in range(data.size())]
        dist.all_gather_object(spans, own, group=data)
    return Domain(
        parameters=found,
        spans=list(zip(*spans, strict=True)),
        shards=[shards.get(one.tensor) for one in held],
        data=data,
        tensor=tensor,
        device=device,
    )
