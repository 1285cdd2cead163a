"""``--form megatron``: TARGET/iter_N as megatron-core's dist_checkpointing.load reads it, optimizer included.

    TARGET/latest_checkpointed_iteration.txt
    TARGET/iter_0000100/part_00000.distcp ...    the tensors' chunks
    TARGET/iter_0000100/objects.distcp           the common state
    TARGET/iter_0000100/.metadata                torch's table of all of it
    TARGET/iter_0000100/metadata.json            what makes it a checkpoint to megatron-core; written last

The optimizer's state is in the fully_reshardable form (optimizer.state.*, without the prefix of chained optimizers).
Generators' states are Megatron's own business and are not written.
"""

import dataclasses
import itertools
import json
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from parallel.errors import UserError
from tools.convert import work
from tools.convert.exporting import TORCH_DTYPES
from tools.reshard.megatron_files import COMMON, CONFIG, METADATA, TorchDist
from tools.reshard.megatron_keys import Style, theirs
from tools.reshard.options import Options
from tools.reshard.plan import KEEPS_DTYPE, Plan, padded_rows
from tools.reshard.rewriting import job_of, rewrite
from tools.reshard.sources import STATE, Source
from tools.reshard.tensors import Origin, Target
from tools.reshard.vocabulary import is_of_vocabulary, repadded
from training.checkpoint import folders
from training.checkpoint.format.writer import write_durably
from training.checkpoint.state import State

OBJECTS = "objects.distcp"
CONTENT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}
"""What Megatron-LM is told of the content, and asks megatron-core for."""


def plan(source: Source, options: Options) -> Plan:
    """Megatron's checkpoint from a source. Raises UserError for what cannot be asked of it.

    Weights are written beside the optimizer's fp32 ones, as Megatron has them, in the dtype that the model computes in.
    """
    config = repadded(source, options)
    rows = padded_rows(source, config, options)
    dtype = options.dtype or TORCH_DTYPES[config.precision.dtype]
    targets: list[tuple[str, Target]] = []
    for key, origin in source.weights().items():
        kept = origin.dtype if key.endswith(KEEPS_DTYPE) else dtype
        targets.append((key, _target(key, origin, kept, rows)))
        if not options.drop_optimizer:
            targets += [(key, _target(name, state, state.dtype, rows)) for name, state in source.states(key).items()]
    state = dataclasses.replace(source.state, optimizer={}) if options.drop_optimizer else source.state
    groups = tuple((target,) for target in _renamed(targets, options.keys))
    return Plan(groups=groups, state=state, config=config)


def _target(key: str, origin: Origin, dtype: str, rows: int | None) -> Target:
    shape = (rows, *origin.shape[1:]) if rows is not None and is_of_vocabulary(key) else origin.shape
    return Target(key, dtype, shape, (origin,))


def _renamed(targets: Sequence[tuple[str, Target]], style: Style) -> Iterator[Target]:
    """By Megatron's keys; blocks put together where it stacks them. Raises UserError where they are not alike."""
    stacks: dict[str, dict[int, Target]] = {}
    for weight, target in targets:
        key, block = theirs(weight, style)
        name = target.key.removesuffix(weight) + key
        if block is None:
            yield dataclasses.replace(target, key=name)
        else:
            stacks.setdefault(name, {})[block] = target
    count = max((len(stack) for stack in stacks.values()), default=0)
    for name, stack in stacks.items():
        alike = {(target.dtype, target.shape) for target in stack.values()}
        if len(stack) != count or len(alike) > 1:
            raise UserError(
                f"--keys stacked: {name} is in {len(stack)} of {count} blocks; Megatron stacks blocks that are alike. "
                "Use --keys per_block for GPTModel, or --keys per_layer for HybridModel."
            )
        ((dtype, shape),) = alike
        origins = tuple(stack[block].origins[0] for block in range(count))
        yield Target(name, dtype, (count, *shape), origins, stacked=True)


def write(source: Source, plan: Plan, target: Path, options: Options, workers: int) -> None:
    """Write ``target``. Killed and started again, it goes on and writes the same bytes."""
    name = folders.name_of(plan.state.progress.iteration)
    with work.unfinished(target, job_of(source, options)) as folder:
        inner = folder / name
        inner.mkdir(exist_ok=True)
        names = rewrite(source, plan, inner, options, workers)
        commit(plan, inner, names, options)
        write_durably(folder / folders.LATEST_OF_MEGATRON, f"{plan.state.progress.iteration}\n".encode())
        work.finish(folder, target)


def reader(target: Path) -> TorchDist:
    """What was written, by the reader of Megatron's own checkpoints."""
    return TorchDist(target / folders.name_of(int((target / folders.LATEST_OF_MEGATRON).read_text())))


def commit(plan: Plan, folder: Path, names: Sequence[str], options: Options) -> None:
    """The common state, ``.metadata``, and what makes the folder count, which comes last."""
    from tools.reshard.megatron_blobs import ENDING, read_table, saved

    common, nothing = saved([common_state(plan, options)]), saved([None])
    write_durably(folder / OBJECTS, common + nothing)
    objects = dict.fromkeys(extra_states(plan), (len(common), len(nothing)))
    tables = {name + ENDING: read_table(folder, name) for name in names}
    write_durably(folder / METADATA, _metadata(plan, tables, objects | {COMMON: (0, len(common))}))
    for name in names:
        (folder / f"{name}.pieces.json").unlink(missing_ok=True)
    write_durably(folder / CONFIG, json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}).encode())


def extra_states(plan: Plan) -> Iterator[str]:
    """Keys of the ``_extra_state`` that megatron-core asks for beside weights: nothing, unless it trains in fp8.

    Which modules have one is the loading job's affair; those that it does not ask for do no harm.
    """
    for target in (target for group in plan.groups for target in group):
        if target.key.startswith(STATE):
            continue
        module = target.key.rpartition(".")[0]
        leading = target.shape[: int(target.stacked) + (".experts.experts." in target.key)]
        modules = [module]
        if module.endswith("self_attention.linear_proj"):
            modules.append(module.replace("linear_proj", "core_attention"))
        for index in itertools.product(*map(range, leading)):
            shard = f"{'.'.join(map(str, index)) or 0}_{'.'.join(map(str, leading)) or 1}"
            yield from (f"{each}._extra_state/shard_{shard}" for each in modules)


def _metadata(plan: Plan, tables: dict[str, Any], objects: dict[str, tuple[int, int]]) -> bytes:
    """torch's own objects, pickled: it is the only form that its reader knows."""
    import torch
    from torch.distributed.checkpoint import metadata
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    chunks: dict[str, list[Any]] = {}
    places: dict[Any, Any] = {}
    for file, written in tables.items():
        for key, offset, shape, start, length in written:
            index = metadata.MetadataIndex(key, torch.Size(offset))
            chunks.setdefault(key, []).append(metadata.ChunkStorageMetadata(torch.Size(offset), torch.Size(shape)))
            places[index] = _StorageInfo(file, start, length)
    entries: dict[str, Any] = {
        target.key: metadata.TensorStorageMetadata(
            metadata.TensorProperties(dtype=getattr(torch, target.dtype)), torch.Size(target.shape), chunks[target.key]
        )
        for group in plan.groups
        for target in group
    }
    for key, (start, length) in objects.items():
        entries[key] = metadata.BytesStorageMetadata()
        places[metadata.MetadataIndex(key)] = _StorageInfo(OBJECTS, start, length)
    return pickle.dumps(metadata.Metadata(entries, planner_data=None, storage_data=places), protocol=4)


def common_state(plan: Plan, options: Options) -> dict[str, Any]:
    """What megatron-core keeps beside tensors: plain values, which its loader of trusted types alone reads."""
    state = plan.state
    found: dict[str, Any] = {
        "iteration": state.progress.iteration,
        "checkpoint_version": 3.0,
        "content_metadata": dict(CONTENT),
        "num_floating_point_operations_so_far": 0,
        "consumed_train_samples": state.progress.consumed_samples,
    }
    if any(target.key.startswith(STATE) for group in plan.groups for target in group):
        found["optimizer"] = _optimizer(plan, state, options)
    return found


def _optimizer(plan: Plan, state: State, options: Options) -> dict[Any, Any]:
    """Parameter groups, which Megatron matches by their own fields; one optimizer, or one for experts as well."""
    groups = [
        _group(group, state.optimizer.get("step")) for group in _distinct(state.optimizer.get("param_groups") or [])
    ]
    dense = [{**group, "is_expert_parallel": False} for group in groups]
    dense = [group for number, group in enumerate(dense) if group not in dense[:number]]
    form = {"param_state_sharding_type": CONTENT["distrib_optim_sharding_type"]}
    scaler = {"grad_scaler": _scaler(state.optimizer["grad_scaler"])} if state.optimizer.get("grad_scaler") else {}
    if options.expert_model_parallel_size == 1 or not _has_experts(plan):
        return {"optimizer": {"param_groups": dense}, **scaler, **form}
    experts = [{**group, "is_expert_parallel": True} for group in dense]
    return {
        0: {"optimizer": {"param_groups": dense}, **scaler, **form},
        1: {"optimizer": {"param_groups": experts}, **scaler, **form},
    }


def _scaler(saved: Any) -> dict[str, Any]:
    """Of fp16, with the scale as the tensor that Megatron has."""
    import torch

    return {**saved, "scale": torch.tensor([saved["scale"]], dtype=torch.float32)}


def _has_experts(plan: Plan) -> bool:
    return any(".experts.experts." in target.key for group in plan.groups for target in group)


def _distinct(groups: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for group in groups:
        if group not in found:
            found.append(dict(group))
    return found


def _group(group: dict[str, Any], step: Any) -> dict[str, Any]:
    """As an optimizer of torch has it: pairs are tuples, and the steps that were taken are the checkpoint's."""
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}
    return {**values, "step": int(step or 0)}
