"""Sublayers that train.recompute chooses: the same losses and gradients, whatever is computed again."""

import dataclasses
from typing import Any

import pytest
import torch
from megatron.core import tensor_parallel

from gradients import VOCABULARY, sums_and_gradients
from models.costs.predict import fullest
from models.costs.recompute_plan import StagePlan, recompute_plans
from models.resolve import resolve
from parallel import groups
from parallel.launch import Identity
from parallel.random_states import set_tracked_states, tracked_states
from ranks import run_ranks
from tests.models.costs.test_recompute_plan import FULL, with_train
from tests.models.test_offload import batches, configured, microbatches
from training.config.run_config import RunConfig
from training.memory.planned import Modules, as_case

CPU = Modules(cuda=False, transformer_engine=False)


def within(config: RunConfig, world_size: int, keeps: float) -> RunConfig:
    """A budget that leaves so much of what full recomputation would spare."""
    shape = resolve(config.model, VOCABULARY)
    ends = [with_train(config, **FULL), config]
    least, most = (each.tensors for each in fullest([as_case(end, world_size, shape, CPU) for end in ends], shape))
    return with_train(config, recompute=f"auto:{(least + keeps * (most - least)) / 2**20:.4f}MiB")


def plans_of(config: RunConfig, world_size: int) -> tuple[StagePlan, ...]:
    shape = resolve(config.model, VOCABULARY)
    return recompute_plans(as_case(config, world_size, shape, CPU), shape)


def compare(identity: Identity, config: RunConfig, chosen: RunConfig, world_size: int) -> None:
    with groups.start(config.layout(world_size), identity, device="cpu", seed=1, parallel=config.parallel) as ranks:
        drawn_from, default = tracked_states(), torch.get_rng_state()
        plain = sums_and_gradients(config, ranks, batches(config))
        set_tracked_states(drawn_from)
        torch.set_rng_state(default)
        calls, real = list[Any](), tensor_parallel.checkpoint

        def counted(function: Any, *args: Any) -> Any:
            calls.append(function)
            return real(function, *args)

        tensor_parallel.checkpoint = counted
        plan = plans_of(chosen, world_size)[ranks.at.pp]
        found = sums_and_gradients(chosen, ranks, batches(config))
        if plan.whole_blocks:  # and depths of multi-token prediction
            assert len(calls) > microbatches(config) * config.model.num_layers / ranks.layout.pp
        else:
            assert len(calls) == microbatches(config) * len(plan.places)
        assert plain.keys() == found.keys()
        for name, expected in plain.items():
            assert torch.equal(found[name], expected), name


@pytest.mark.parametrize(
    ("layout", "shape", "keeps"),
    [
        ("tp2sp", "debug", 0.2),
        pytest.param("pp2vpp2", "debug", 0.4, marks=pytest.mark.campaign),
        pytest.param("dp2zero3", "debug", 0.6, marks=pytest.mark.campaign),
        pytest.param("tp2spdp2ep2etp1", "mixtral_tiny", 0.5, marks=pytest.mark.campaign),
        ("ep2", "mixtral_tiny", 0.5),
        pytest.param("tp2sp", "gpt2_tiny", 0.5, marks=pytest.mark.campaign),
        ("", "deepseek_v3_tiny", 0.5),
        ("", "nemotron_h_tiny", 0.5),
        ("pp2", "deepseek_v3_tiny", 0.02),
    ],
)
def test_the_same_losses_and_gradients(layout: str, shape: str, keeps: float) -> None:
    """With dropout, which draws again what it drew. 0.02: whole blocks of a stage."""
    config, world_size = configured(layout, shape)
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1} if shape in ("debug", "gpt2_tiny") else {}
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **dropout))
    chosen = within(config, world_size, keeps)
    plans = plans_of(chosen, world_size)
    assert any(plan.whole_blocks if keeps < 0.1 else plan.places for plan in plans)
    run_ranks(world_size, compare, config, chosen, world_size)
