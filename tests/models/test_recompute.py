"""Sublayers that train.recompute chooses: the same losses and gradients, whatever is computed again."""

import dataclasses
from typing import Any

import pytest
import torch
from megatron.core import tensor_parallel

from gradients import VOCABULARY, sums_and_gradients
from models.resolve import resolve
from parallel import groups
from parallel.launch import Identity
from ranks import run_ranks
from tests.models.test_offload import MICROBATCHES, batches, configured
from training.config.run_config import RunConfig
from training.memory.planned import Modules, Planned
from training.memory.predicted import fullest
from training.memory.recompute_plan import recompute_plans

CPU = Modules(cuda=False, transformer_engine=False)
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def with_train(config: RunConfig, **fields: Any) -> RunConfig:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **fields))


def within(config: RunConfig, world_size: int, keeps: float) -> RunConfig:
    """A budget that leaves so much of what full recomputation would spare."""
    shape = resolve(config.model, VOCABULARY)
    ends = [with_train(config, **FULL), config]
    least, most = (
        each.tensors for each in fullest([Planned(config=end, world_size=world_size) for end in ends], shape, CPU)
    )
    return with_train(config, recompute=f"auto:{(least + keeps * (most - least)) / 2**20:.4f}MiB")


def compare(identity: Identity, config: RunConfig, chosen: RunConfig, world_size: int) -> None:
    with groups.start(
        config.layout(world_size), identity, device="cpu", seed=1, timeout_minutes=1, parallel=config.parallel
    ) as ranks:
        plain = sums_and_gradients(config, ranks, batches(config))
        calls, real = list[Any](), tensor_parallel.checkpoint

        def counted(function: Any, *args: Any) -> Any:
            calls.append(function)
            return real(function, *args)

        tensor_parallel.checkpoint = counted
        plan = recompute_plans(chosen, world_size, resolve(config.model, VOCABULARY), CPU)[ranks.at.pp]
        found = sums_and_gradients(chosen, ranks, batches(config))
        assert len(calls) == MICROBATCHES * len(plan.places)
        assert plain.keys() == found.keys()
        for name, expected in plain.items():
            assert torch.equal(found[name], expected), name


@pytest.mark.parametrize(
    ("layout", "shape", "keeps"),
    [
        ("tp2sp", "debug", 0.2),
        ("pp2vpp2", "debug", 0.4),
        ("dp2zero3", "debug", 0.6),
        ("tp2spdp2ep2etp1", "mixtral_tiny", 0.5),
        ("tp2sp", "gpt2_tiny", 0.5),
        ("", "deepseek_v3_tiny", 0.5),
        ("tp2sp", "nemotron_h_tiny", 0.5),
    ],
)
def test_the_same_losses_and_gradients(layout: str, shape: str, keeps: float) -> None:
    """gpt2_tiny has dropout, which draws again what it drew."""
    config, world_size = configured(layout, shape)
    chosen = within(config, world_size, keeps)
    plans = recompute_plans(chosen, world_size, resolve(config.model, VOCABULARY), CPU)
    assert any(plan.places for plan in plans)
    run_ranks(world_size, compare, config, chosen, world_size)
