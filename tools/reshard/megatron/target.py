"""``--format megatron``: TARGET/iter_N as megatron-core's dist_checkpointing.load reads it, optimizer included.

    TARGET/latest_checkpointed_iteration.txt
    TARGET/iter_0000100/part_00000.distcp ...    the tensors' chunks
    TARGET/iter_0000100/objects.distcp           the common state, and what ranks keep beside tensors
    TARGET/iter_0000100/.metadata                torch's table of all of it
    TARGET/iter_0000100/metadata.json            what makes it a checkpoint to megatron-core; written last

The optimizer's state is by weight (fully_reshardable: optimizer.state.*, without the prefix of chained optimizers), or
as ranks have it in memory (dp_reshardable: ``buckets``). Generators' states are Megatron's own business and
are not written.
"""

import itertools
import json
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from program.durable import replace_file
from program.untrusted import read_text
from tools.reshard.checkpoint_source import STATE, CheckpointSource
from tools.reshard.megatron.dp_reshardable import BUCKET
from tools.reshard.megatron.files import COMMON, CONFIG, METADATA, TorchDist
from tools.reshard.megatron.state import common_state, rank_states
from tools.reshard.model_recipe import FOLDER as TOKENIZER
from tools.reshard.model_recipe import write_into
from tools.reshard.options import ReshardOptions
from tools.reshard.plan import ReshardPlan
from tools.reshard.rewriting import job_of, rewrite
from tools.shared import resumable
from training.checkpoint import folders

OBJECTS = "objects.distcp"


def write(source: CheckpointSource, plan: ReshardPlan, target: Path, options: ReshardOptions, workers: int) -> None:
    """Write ``target``. Killed and started again, it goes on and writes the same bytes."""
    name = folders.name_of(plan.state.progress.iteration)
    with resumable.unfinished(target, job_of(source, options)) as folder:
        inner = folder / name
        inner.mkdir(exist_ok=True)
        names = rewrite(source, plan, inner, options, workers)
        write_into(inner / TOKENIZER, source)
        commit(plan, inner, names, options)
        replace_file(folder / folders.LATEST_OF_MEGATRON, f"{plan.state.progress.iteration}\n".encode())


def reader(target: Path) -> TorchDist:
    """What was written, by the reader of Megatron's own checkpoints."""
    return TorchDist(target / folders.name_of(int(read_text(target / folders.LATEST_OF_MEGATRON))))


def commit(plan: ReshardPlan, folder: Path, names: Sequence[str], options: ReshardOptions) -> None:
    """The common state, ``.metadata``, and what makes the folder count, which comes last."""
    from tools.reshard.megatron.blobs import ENDING, read_table, saved

    common, nothing = saved([common_state(plan, options)]), saved([None])
    parts, end = [common, nothing], len(common) + len(nothing)
    objects = dict.fromkeys(extra_states(plan), (len(common), len(nothing))) | {COMMON: (0, len(common))}
    for key, value in rank_states(plan, options):
        parts.append(saved([value]))
        objects[f"{key}/shard_0_1"] = (end, len(parts[-1]))
        end += len(parts[-1])
    replace_file(folder / OBJECTS, b"".join(parts))
    tables = {name + ENDING: read_table(folder, name) for name in names}
    replace_file(folder / METADATA, metadata_bytes(plan, tables, objects))
    for name in names:
        (folder / f"{name}.pieces.json").unlink(missing_ok=True)
    replace_file(folder / CONFIG, json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}).encode())


def extra_states(plan: ReshardPlan) -> Iterator[str]:
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


def metadata_bytes(
    plan: ReshardPlan, tables: dict[str, Any], objects: dict[str, tuple[int, int]], paths: Any = None
) -> bytes:
    """torch's own objects, pickled: it is the only form that its reader knows.

    tables: chunks by file. objects: first byte and bytes in ``OBJECTS``. paths: where entries lie in nested dicts.
    """
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
    return pickle.dumps(metadata.Metadata(entries, planner_data=paths, storage_data=places), protocol=4)
