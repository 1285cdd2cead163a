"""Muon for this rank's chunks: whose each parameter is, and where megatron-core's optimizers have its elements."""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from parallel import ddp
from parallel.config import ParallelConfig
from parallel.ddp import Chunks
from parallel.groups import Ranks
from parallel.regions import HeldTensor
from program.printing import columns
from training.checkpoint.optimizer_state import MainParam, main_params, parts
from training.config.optimizer_config import OptimizerConfig
from training.muon.dealing import FlatRange, Group
from training.muon.matrices import MatrixParameter, is_matrix, on_all_ranks
from training.muon.update import MOMENTUM, Domain, MomentumShard, update
from training.optimizer_forms import MOMENTS

QKV = "linear_qkv.weight"


def install(
    optimizer: MegatronOptimizer, chunks: Chunks, config: OptimizerConfig, parallel: ParallelConfig, ranks: Ranks
) -> None:
    """Let ``optimizer``, AdamW until now, update matrices by Muon. Collective, as each of its steps then is."""
    mains = dict(main_params(optimizer))
    shards = _shards(optimizer, mains)
    held = [one for chunk in chunks for one in ddp.held(chunk) if one.tensor.requires_grad]
    qkv = qkv_rows(chunks[0].config) if config.muon_split_qkv else ()
    domains = []
    for is_expert in (False, True):
        muons = [one for one in held if is_matrix(one.tensor) and _is_expert(one.tensor) == is_expert]
        tensor = ranks.pgs.expt_tp if is_expert else ranks.pgs.tp
        parameters = [_described(one, tensor, qkv, config.muon_split_fused) for one in muons]
        data = data_group(ranks, parallel, is_expert)
        spans = _on_all_ranks([_span(one, mains.get(one.tensor)) for one in muons], data)
        own = [shards.get(one.tensor) for one in muons]
        domains.append(Domain(parameters, spans, own, data, tensor, ranks.device))
    _say([one for domain in domains for one in domain.parameters], held, ranks)
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        part.state_names = state_names
    optimizer.step_with_ready_grads = partial(_update_first, optimizer.step_with_ready_grads, domains, config)


def _update_first(step: Any, domains: Sequence[Domain], config: OptimizerConfig) -> bool:
    """Megatron's own ``step_with_ready_grads``, once Muon's parameters are updated: it gathers the weights of both."""
    update(domains, config)
    return bool(step())


def qkv_rows(config: TransformerConfig) -> tuple[int, ...]:
    """Of a query group in a fused projection: Q, its output gate where there is one, K and V; each a matrix over all
    groups."""
    queries = config.num_attention_heads // (config.num_query_groups or config.num_attention_heads) * config.kv_channels
    return (queries,) * (1 + config.attention_output_gate) + (config.kv_channels,) * 2


def state_names(param: Tensor) -> Sequence[str]:
    """What is kept of a model's parameter."""
    return (MOMENTUM,) if is_matrix(param) else MOMENTS


def data_group(ranks: Ranks, parallel: ParallelConfig, is_expert: bool) -> Group:
    """Ranks that together hold all shards of a parameter once; None without ZeRO."""
    if parallel.sharding == "no_shard":
        return None
    if parallel.num_distributed_optimizer_instances > 1:
        return ranks.pgs.intra_expt_dp if is_expert else ranks.pgs.intra_dp_cp
    return ranks.pgs.expt_dp if is_expert else ranks.pgs.dp_cp


def _is_expert(param: Tensor) -> bool:
    return not getattr(param, "allreduce", True)  # Megatron's mark


def _described(one: HeldTensor, tensor: dist.ProcessGroup, qkv: Sequence[int], split_fused: bool) -> MatrixParameter:
    key, rows = one.regions[0].key, one.regions[0].global_shape[-2]
    in_groups = key.endswith(QKV) and qkv and rows % sum(qkv) == 0
    return on_all_ranks(key, one, tensor, qkv=qkv if in_groups else (), split=split_fused)


def _shards(optimizer: MegatronOptimizer, mains: Mapping[Tensor, MainParam]) -> dict[Tensor, MomentumShard]:
    """By model parameter. Their momentum is where Adam's first step would look for its own state, which it then has."""
    of_main = {
        main: (group, part.optimizer.state)
        for part in parts(optimizer)
        for group in part.optimizer.param_groups
        for main in group["params"]
    }
    found = {}
    for param, main in mains.items():
        if is_matrix(param):
            group, state = of_main[main.tensor]
            state[main.tensor][MOMENTUM] = torch.zeros_like(main.tensor, dtype=torch.float32)
            found[param] = MomentumShard(main.tensor, state[main.tensor][MOMENTUM], group)
    return found


def _span(one: HeldTensor, main: MainParam | None) -> FlatRange:
    """Of this rank's elements, in what the ranks of data parallelism hold together."""
    start = one.start + (main.start if main else 0)
    return FlatRange(start, start + (main.tensor.numel() if main else 0))


def _on_all_ranks(own: list[FlatRange], data: Group) -> list[list[FlatRange]]:
    """Of each parameter, every rank's. Collective."""
    if data is None:
        return [[span] for span in own]
    found: list[list[FlatRange]] = [[] for _ in range(data.size())]
    dist.all_gather_object(found, own, group=data)
    return [list(spans) for spans in zip(*found, strict=True)]


def _say(muons: Sequence[MatrixParameter], held: Iterable[HeldTensor], ranks: Ranks) -> None:
    """Which parameters are whose, and which are split into matrices: a table of all stages' on the console, those that
    differ in numbers in one row. Collective."""
    own = {_kind(one.name): _matrices(one) for one in muons}
    others = {_kind(one.regions[0].key) for one in held if one.tensor.requires_grad and not is_matrix(one.tensor)}
    stages: list[tuple[dict[str, tuple[str, str]], set[str]]] = [({}, set())] * ranks.layout.pp
    dist.all_gather_object(stages, (own, others), group=ranks.pgs.pp)
    rows = {name: row for found, _ in stages for name, row in found.items()}
    adam = sorted({name for _, names in stages for name in names})
    heads = ("", "elements", "matrices, each orthogonalized whole")
    ranks.say("Muon updates, a layer each:")
    for line in columns([heads, *((name, *rows[name]) for name in sorted(rows))], left=(0, 2)):
        ranks.say(line)
    ranks.say(f"AdamW updates: {', '.join(adam)}")


def _kind(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def _matrices(one: MatrixParameter) -> tuple[str, str]:
    matrices = [f"{height * one.groups} x {one.columns}" for height in one.heights]
    return f"{one.rows} x {one.columns}", " + ".join(matrices)
