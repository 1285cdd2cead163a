"""``--format dcp``: TARGET as torch.distributed.checkpoint.load reads it.

    TARGET/part_00000.distcp ...    the tensors' chunks
    TARGET/objects.distcp           hyperparameters of the optimizer, and progress
    TARGET/.metadata                torch's table of all of it
    TARGET/config.json ...          the model, and its tokenizer's files, where the checkpoint carries some

Names: ``model.NAME``, ``optimizer.state.NAME.exp_avg``, ``optimizer.param_groups.0.lr`` with transformers' names, as
{"model": ..., "optimizer": ...} has them; ``NAME`` with torchtitan's, which keeps the model flat. The optimizer's
hyperparameters are there by parameter, too (flatten_optimizer_state_dict).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from program.durable import replace_file
from tools.reshard.checkpoint_source import CheckpointSource
from tools.reshard.dcp.source import DcpFiles
from tools.reshard.megatron.files import METADATA
from tools.reshard.megatron.target import OBJECTS, metadata_bytes
from tools.reshard.model_recipe import write_config_json, write_into
from tools.reshard.options import ReshardOptions
from tools.reshard.plan import ReshardPlan
from tools.reshard.rewriting import job_of, rewrite
from tools.shared import resumable
from training.checkpoint.format.tables import remove_tables
from training.checkpoint.stage_entry import tokens_of

_STEP = ".step"


def write(source: CheckpointSource, plan: ReshardPlan, target: Path, options: ReshardOptions, workers: int) -> None:
    """Write ``target``. Killed and started again, it goes on and writes the same bytes."""
    from tools.reshard.megatron.blobs import ENDING, read_table, saved

    with resumable.unfinished(target, job_of(source, options)) as folder:
        names = rewrite(source, plan, folder, options, workers)
        parts, end, objects = [], 0, {}
        for key, value in _objects(plan, options):
            data = saved(value)
            objects[key] = (end, len(data))
            parts.append(data)
            end += len(data)
        replace_file(folder / OBJECTS, b"".join(parts))
        tables = {name + ENDING: read_table(folder, name) for name in names}
        paths = {key: _path(key, options) for key in [*objects, *_keys(plan)]}
        replace_file(folder / METADATA, metadata_bytes(plan, tables, objects, paths))
        write_into(folder, source)
        write_config_json(folder, source, plan)
        remove_tables(folder, names)


def reader(target: Path) -> DcpFiles:
    """What was written, by the reader of others' checkpoints."""
    return DcpFiles(target)


def _keys(plan: ReshardPlan) -> Iterator[str]:
    return (target.key for group in plan.groups for target in group)


def _path(key: str, options: ReshardOptions) -> tuple[Any, ...]:
    """Where an entry lies in the nested dict that it was saved from."""
    first, _, rest = key.partition(".")
    if options.names == "torchtitan":
        return (first, rest) if first in ("optimizer", "train_state") else (key,)
    if first == "model":
        return first, rest
    if key.startswith("optimizer.state."):
        name, _, state = rest.removeprefix("state.").rpartition(".")
        return first, "state", name, state
    if key.startswith("optimizer.param_groups.0."):
        return first, "param_groups", 0, key.rpartition(".")[2]
    return tuple(key.split("."))


def _objects(plan: ReshardPlan, options: ReshardOptions) -> Iterator[tuple[str, Any]]:
    """What is no tensor: the hyperparameters of torch.optim.AdamW, and how far training is."""
    states = "optimizer.state."
    trained = [key.removeprefix(states).removesuffix(_STEP) for key in _keys(plan) if key.endswith(_STEP)]
    given = plan.config.optimizer
    numbers: dict[str, Any] = {
        "lr": given.lr, "betas": (given.adam_beta1, given.adam_beta2), "eps": given.adam_eps,
        "weight_decay": given.weight_decay, "amsgrad": False, "maximize": False, "foreach": None, "capturable": False,
        "differentiable": False, "fused": None, "decoupled_weight_decay": True,
    }  # fmt: skip
    for name in trained:
        yield from ((f"optimizer.param_groups.{name}.{key}", value) for key, value in numbers.items())
    progress = plan.state.progress
    if options.names == "torchtitan":
        yield "train_state.step", progress.iteration
        tokens = tokens_of(plan.state.entries, progress.consumed_samples, plan.config.model.seq_length)
        yield "train_state.ntokens_seen", tokens
    elif trained:
        group = {**numbers, "params": trained}
        yield from ((f"optimizer.param_groups.0.{key}", value) for key, value in group.items())
