"""``--form megatron``: TARGET/iter_N as megatron-core's dist_checkpointing.load reads it, optimizer included.

    TARGET/latest_checkpointed_iteration.txt
    TARGET/iter_0000100/part_00000.distcp ...    the tensors' chunks
    TARGET/iter_0000100/objects.distcp           the common state, and what ranks keep beside tensors
    TARGET/iter_0000100/.metadata                torch's table of all of it
    TARGET/iter_0000100/metadata.json            what makes it a checkpoint to megatron-core; written last

The optimizer's state is by weight (fully_reshardable: optimizer.state.*, without the prefix of chained optimizers), or
as ranks have it in memory (dp_reshardable: ``megatron_buckets``). Generators' states are Megatron's own business and
are not written.
"""

import dataclasses
import itertools
import json
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from models.families import resolve
from models.shapes import GPTShape
from parallel.errors import UserError
from parallel.untrusted import read_text
from tools.convert import work
from tools.convert.exporting import TORCH_DTYPES
from tools.reshard.megatron_buckets import Memory, flat_origin, memories
from tools.reshard.megatron_files import COMMON, CONFIG, METADATA, TorchDist
from tools.reshard.megatron_flat import BUCKET
from tools.reshard.megatron_keys import Style, theirs
from tools.reshard.megatron_state import common_state, dtypes_of, rank_states
from tools.reshard.options import Options
from tools.reshard.plan import KEEPS_DTYPE, Plan, padded_rows
from tools.reshard.rewriting import job_of, rewrite
from tools.reshard.sources import STATE, STATES, Source
from tools.reshard.tensors import Origin, Target
from tools.reshard.vocabulary import is_of_vocabulary, repadded
from training.checkpoint import folders
from training.checkpoint.format.writer import write_durably

OBJECTS = "objects.distcp"


def plan(source: Source, options: Options) -> Plan:
    """Megatron's checkpoint from a source. Raises UserError for what cannot be asked of it.

    Weights are written beside the optimizer's fp32 ones, as Megatron has them, in the dtype that the model computes in.
    """
    config = repadded(source, options)
    shape = resolve(config.model, source.real_vocab_size)
    if problems := options.job.problems(shape.num_layers, shape.mtp_num_layers):
        raise UserError("\n".join(problems))
    rows = padded_rows(source, config, options)
    dtype = options.dtype or TORCH_DTYPES[config.precision.dtype]
    targets: list[tuple[str, Target]] = []
    for key, origin in source.weights().items():
        kept = origin.dtype if key.endswith(KEEPS_DTYPE) else dtype
        targets.append((key, _target(key, origin, kept, rows)))
        if not options.drop_optimizer:
            targets += [(key, _target(name, state, state.dtype, rows)) for name, state in source.states(key).items()]
    state = dataclasses.replace(source.state, optimizer={}) if options.drop_optimizer else source.state
    memories: tuple[Memory, ...] = ()
    flat: list[Target] = []
    if options.job.optimizer_form == "dp_reshardable" and not options.drop_optimizer:
        memories = _memories(targets, source, shape, options)
        flat = _in_buckets(memories, targets, dtypes_of(config, dtype))
        targets = [(key, target) for key, target in targets if key == target.key]
    groups = tuple((target,) for target in (*_renamed(targets, options.keys), *flat))
    return Plan(groups=groups, state=state, config=config, memories=memories)


def _memories(
    targets: Sequence[tuple[str, Target]], source: Source, shape: GPTShape, options: Options
) -> tuple[Memory, ...]:
    """What of the optimizer lies where. Raises UserError for sizes that do not fit, and where there is no optimizer."""
    shapes = {key: target.shape for key, target in targets if key == target.key}
    with_state = {key for key, target in targets if key != target.key}
    if bare := [key for key in shapes if key not in with_state and not key.endswith(KEEPS_DTYPE)]:
        raise UserError(
            f"--optimizer_form dp_reshardable: {source.folder} has no optimizer's state of {bare[0]}. Leave it out."
        )
    return tuple(memories(options.job, shape, shapes))


def _in_buckets(found: Sequence[Memory], targets: Sequence[tuple[str, Target]], dtypes: str) -> list[Target]:
    """A tensor for each bucket and state."""
    origin_of = {target.key: target.origins[0] for _, target in targets}
    flat: list[Target] = []
    for memory in found:
        for (number, buffer), state in itertools.product(enumerate(memory.buffers), STATES):
            states = {key: origin_of[f"{STATE}{state}.{key}"] for key in memory.keys}
            for at, bucket in enumerate(buffer):
                origin = flat_origin(bucket, states)
                key = f"{memory.prefix}.gbuf_idx_{number}.dtype_{dtypes}.bucket_idx_{at}.{state}"
                flat.append(Target(key, origin.dtype, (bucket.unpadded,), (origin,)))
    return flat


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
    return TorchDist(target / folders.name_of(int(read_text(target / folders.LATEST_OF_MEGATRON))))


def commit(plan: Plan, folder: Path, names: Sequence[str], options: Options) -> None:
    """The common state, ``.metadata``, and what makes the folder count, which comes last."""
    from tools.reshard.megatron_blobs import ENDING, read_table, saved

    common, nothing = saved([common_state(plan, options)]), saved([None])
    parts, end = [common, nothing], len(common) + len(nothing)
    objects = dict.fromkeys(extra_states(plan), (len(common), len(nothing))) | {COMMON: (0, len(common))}
    for key, value in rank_states(plan, options):
        parts.append(saved([value]))
        objects[f"{key}/shard_0_1"] = (end, len(parts[-1]))
        end += len(parts[-1])
    write_durably(folder / OBJECTS, b"".join(parts))
    tables = {name + ENDING: read_table(folder, name) for name in names}
    write_durably(folder / METADATA, _metadata(plan, tables, objects))
    for name in names:
        (folder / f"{name}.pieces.json").unlink(missing_ok=True)
    write_durably(folder / CONFIG, json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}).encode())


def extra_states(plan: Plan) -> Iterator[str]:
    """Keys of the ``_extra_state`` that megatron-core asks for beside weights: nothing, unless it trains in fp8.

    Which modules have one is the loading job's affair; those that it does not ask for do no harm. An output layer has
    one even where its weight is the embedding's.
    """
    yield "output_layer._extra_state/shard_0_1"
    for target in (target for group in plan.groups for target in group):
        if target.key.startswith(STATE) or BUCKET.match(target.key):
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
