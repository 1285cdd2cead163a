"""What a Megatron checkpoint keeps beside tensors: the common state, and, of dp_reshardable, what each rank has.

Plain values, and tuples of torch's dtypes as keys: what torch.load reads with trusted types alone. ``args`` is an
argparse.Namespace, which is among the types that megatron-core's safe_globals.py (0.19.2) admits.
"""

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from models.resolve import resolve
from tools.reshard.checkpoint_source import STATE
from tools.reshard.megatron import args as megatron_args
from tools.reshard.megatron.buckets import FlatMemory
from tools.reshard.options import ReshardOptions
from tools.reshard.plan import OF_VOCABULARY, ReshardPlan
from tools.shared.dtypes import TORCH_DTYPES
from training.checkpoint.schedule_entry import kept_schedule
from training.checkpoint.state import State
from training.config.run_config import RunConfig


def content(options: ReshardOptions) -> dict[str, Any]:
    """What Megatron-LM knows of the content, and asks megatron-core for."""
    found: dict[str, Any] = {"distrib_optim_sharding_type": options.job.optimizer_format}
    if options.job.optimizer_format == "fully_reshardable":
        found["distrib_optim_fully_reshardable_mem_efficient"] = False
    return {**found, "chained_optim_avoid_prefix": True, "singleton_local_shards": False}


def common_state(plan: ReshardPlan, options: ReshardOptions) -> dict[str, Any]:
    """What all ranks read: Megatron-LM's load_checkpoint takes each of these keys."""
    config, progress, entries = plan.config, plan.state.progress, plan.state.entries
    (rows,) = {target.shape[0] for group in plan.groups for target in group if target.key == OF_VOCABULARY[0]}
    shape = resolve(config.model, rows if config.model.vocab_size is None else None)
    args = megatron_args.arguments(config, shape, progress, options, rows, _known(entries.get(megatron_args.ARGS)))
    found: dict[str, Any] = {
        "args": Namespace(**args),
        "iteration": progress.iteration,
        "checkpoint_version": 3.0,
        "content_metadata": content(options),
        "num_floating_point_operations_so_far": megatron_args.operations(config, shape, progress),
    }
    if _has_optimizer(plan):
        found["optimizer"] = _optimizer(plan, options)
        known = _known(entries.get(megatron_args.SCHEDULER))
        found["opt_param_scheduler"] = megatron_args.scheduler(config, progress, known, kept_schedule(entries))
    return found


def _known(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def rank_states(plan: ReshardPlan, options: ReshardOptions) -> Iterator[tuple[str, Any]]:
    """Of dp_reshardable, by key: the numbers of each rank's optimizer, and the sizes of its buckets, which
    megatron-core compares with its own before it loads them."""
    dtypes = _torch_dtypes(plan.config, options)
    for memory in plan.memories:
        numbers = _numbers(plan, memory.chained == "chained_1")
        for name, value in {**numbers, **bucket_sizes(memory, dtypes)}.items():
            yield f"{memory.prefix}.{name}", value


def bucket_sizes(memory: FlatMemory, dtypes: Any) -> dict[str, list[dict[Any, list[int]]]]:
    """Elements of each buffer's buckets, under its dtypes: with the padding that ranks have, and without."""
    return {
        "per_bucket_numel": [{dtypes: [bucket.padded for bucket in buffer]} for buffer in memory.buffers],
        "per_bucket_numel_unpadded": [{dtypes: [bucket.unpadded for bucket in buffer]} for buffer in memory.buffers],
    }


def dtypes_of(config: RunConfig, dtype: str) -> str:
    """Of a buffer, as its keys have it: the weights' dtype and their gradients'."""
    return f"(torch.{dtype}, torch.{_grad_dtype(config, dtype)})"


def _torch_dtypes(config: RunConfig, options: ReshardOptions) -> Any:
    import torch

    dtype = options.dtype or TORCH_DTYPES[config.precision.dtype]
    return getattr(torch, dtype), getattr(torch, _grad_dtype(config, dtype))


def _grad_dtype(config: RunConfig, dtype: str) -> str:
    return "float32" if config.precision.grad_reduce_in_fp32 else dtype


def _has_optimizer(plan: ReshardPlan) -> bool:
    return bool(plan.memories) or any(target.key.startswith(STATE) for group in plan.groups for target in group)


def _optimizer(plan: ReshardPlan, options: ReshardOptions) -> dict[Any, Any]:
    """One optimizer, or one for experts as well. Of dp_reshardable, their numbers are each rank's own."""
    form = {"param_state_sharding_type": options.job.optimizer_format}
    dense, experts = ({} if plan.memories else _numbers(plan, of_experts) for of_experts in (False, True))
    if not options.job.has_experts_apart or not _has_experts(plan):
        return {**dense, **form}
    return {0: {**dense, **form}, 1: {**experts, **form}}


def _numbers(plan: ReshardPlan, of_experts: bool) -> dict[str, Any]:
    """Parameter groups, which Megatron matches by their own fields, and the loss scale."""
    state = plan.state
    groups = [_group(group, state.optimizer.get("step")) for group in _groups(state)]
    named = [{**group, "is_expert_parallel": of_experts} for group in groups]
    scaler = {"grad_scaler": _scaler(state.optimizer["grad_scaler"])} if state.optimizer.get("grad_scaler") else {}
    return {"optimizer": {"param_groups": _distinct(named)}, **scaler}


def _groups(state: State) -> list[dict[str, Any]]:
    groups: Any = state.optimizer.get("param_groups") or []
    return [dict(group) for group in groups]


def _group(group: dict[str, Any], step: Any) -> dict[str, Any]:
    """As an optimizer of torch has it: pairs are tuples, and the steps that were taken are the checkpoint's."""
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}
    return {**values, "step": int(step or 0)}


def _distinct(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for group in groups:
        if group not in found:
            found.append(group)
    return found


def _scaler(saved: Any) -> dict[str, Any]:
    """Of fp16, with the scale as the tensor that Megatron has."""
    import torch

    return {**saved, "scale": torch.tensor([saved["scale"]], dtype=torch.float32)}


def _has_experts(plan: ReshardPlan) -> bool:
    return any(".experts.experts." in target.key for group in plan.groups for target in group)
