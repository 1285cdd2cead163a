"""megatron-core's own save and load of the same model and optimizer, side by side.

``fully_reshardable`` is its form that any layout reads; ``dp_reshardable``, Megatron-LM's default, is faster, and
bound to one TP, PP and EP. Both as Megatron-LM calls them: fully parallel over the data-parallel ranks.
"""

import contextlib
import multiprocessing
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from parallel.ddp import unwrap
from tests.benchmarks.checkpoint import disk, memory
from training.step import RankParts

Form = Literal["fully_reshardable", "dp_reshardable"]


def save_once(trainer: RankParts, folder: Path, form: Form) -> dict[str, float]:
    """Seconds of a save, and this rank's growth in bytes. The folder is made here."""
    if trainer.ranks.rank == 0:
        folder.mkdir(parents=True)
    strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(), trainer.ranks.pgs.dp_cp)

    def save() -> None:
        state = state_dict(trainer, form, is_loading=False)
        dist_checkpointing.save(state, str(folder), strategy, validate_access_integrity=False, async_strategy="mcore")

    cost = memory.cost(save, dist.barrier)
    dist.barrier()
    return {f"{form}_save_s": cost.seconds, f"{form}_save_growth": float(cost.grown_bytes)}


def load_once(trainer: RankParts, folder: Path, form: Form) -> dict[str, float]:
    """Seconds of a load of files that are not in memory, and this rank's growth in bytes. Nothing is verified."""
    if trainer.ranks.rank == 0:
        disk.forget(folder.iterdir())
    strategy = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), trainer.ranks.pgs.dp_cp)

    def load() -> None:
        with torch.no_grad(), torch_adam_loads():
            state = state_dict(trainer, form, is_loading=True)
            loaded = dist_checkpointing.load(state, str(folder), strategy, validate_access_integrity=False)
            for number, chunk in enumerate(trainer.chunks):
                unwrap(chunk).load_state_dict(loaded[f"model{number}"], strict=False)
            trainer.optimizer.load_state_dict(loaded["optimizer"])

    cost = memory.cost(load, dist.barrier)
    dist.barrier()
    return {f"{form}_load_s": cost.seconds, f"{form}_load_growth": float(cost.grown_bytes)}


def state_dict(trainer: RankParts, form: Form, *, is_loading: bool) -> dict[str, Any]:
    """What Megatron-LM saves, tensors alone."""
    metadata = {
        "distrib_optim_sharding_type": form,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": trainer.ranks.pgs.dp_cp,
    }
    state: dict[str, Any] = {
        f"model{number}": unwrap(chunk).sharded_state_dict(metadata=metadata)
        for number, chunk in enumerate(trainer.chunks)
    }
    model = {name: entry for part in state.values() for name, entry in part.items()}
    state["optimizer"] = trainer.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return state


def end_helpers(inherited: Sequence[BaseProcess]) -> None:
    """mcore keeps a manager process for the results of its writers, which would outlive a forked rank.

    A forked rank also lists the children of its parent, which are not its own to end: ``inherited``.
    """
    for process in multiprocessing.active_children():
        if process not in inherited:
            process.terminate()
            process.join()


@contextlib.contextmanager
def torch_adam_loads() -> Iterator[None]:
    """Where neither Transformer Engine nor Apex is installed, mcore 0.19.2 asks torch's Adam for a step it lacks."""
    original = DistributedOptimizer._set_main_param_and_optimizer_states

    def with_step(self: Any, param: Any, tensors: dict[str, Any]) -> None:
        original(self, param, {"step": None, **tensors})

    with mock.patch.object(DistributedOptimizer, "_set_main_param_and_optimizer_states", with_step):
        yield
