"""Weights, gradients and optimizer bytes: those of the program, to the byte."""

import itertools
from dataclasses import replace

import pytest

from models.costs.candidate import Candidate, Zero, parallel_config
from models.costs.program import OURS, sharded
from models.costs.stage_parameters import stages
from models.costs.states import BlockStack, states
from models.families import named
from parallel.config import PrecisionConfig
from parallel.layout import layout_of
from parallel.stages import stage_problems
from tests.models.costs.by_hand import rank_bytes

LAYOUTS = [
    Candidate(tp=2, pp=4, dp=2),
    Candidate(tp=4, pp=2, vpp=4, cp=2, dp=3),
    Candidate(tp=1, pp=2, dp=8, zero=0),
    Candidate(tp=8, pp=4, dp=2, split="ends", first_layers=14, last_layers=14),
    Candidate(tp=2, pp=6, vpp=7, dp=2),
]
EXPERTS = [
    Candidate(tp=2, pp=2, ep=4, dp=4),
    Candidate(tp=2, pp=2, ep=1, etp=2, dp=4),
    Candidate(tp=1, pp=4, ep=8, dp=8, split="ends", first_layers=15, last_layers=14),
]


@pytest.mark.parametrize(
    "name",
    [
        "llama3_8b",
        "llama31_405b",
        "gpt3_175b",
        "llama32_1b",
        "deepseek_v3",
        "qwen3_30b_a3b",
        "nemotron_h_8b",
        "nemotron3_nano_30b_a3b",
        "qwen3_next_80b_a3b",
        "qwen35_27b",
    ],
)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_every_stage_holds_what_the_program_says(name: str, dtype: str) -> None:
    shape, seen = named(name), 0
    for layout in LAYOUTS + (EXPERTS if shape.num_moe_experts else []):
        parallel = parallel_config(layout, experts=shape.num_moe_experts > 0)
        if stage_problems(parallel, shape.num_layers, shape.mtp_num_layers):
            continue
        stack, precision = BlockStack(shape), PrecisionConfig(dtype=dtype)
        for number, stage in enumerate(stages(shape, parallel)):
            own = states(stack.held(layout, number), _with(layout, dtype))
            expected = rank_bytes(stage, precision, parallel, layout_of(parallel, layout.world_size))
            assert own == pytest.approx((expected.weights, expected.gradients, expected.optimizer, 0), rel=1e-15)
            blocks = stack.blocks(layout)[number]
            assert blocks.plain + blocks.mixtures == sum(blocks.kinds.values()) == sum(map(len, stage.layers))
            seen += 1
    assert seen >= 4


def _with(layout: Candidate, dtype: str) -> Candidate:
    return replace(layout, precision=dtype)


def test_sharding_more_holds_less() -> None:
    held = BlockStack(named("llama3_8b")).held(Candidate(dp=8), 0)
    totals = [states(held, Candidate(dp=8, zero=zero)).total for zero in (0, 1, 2, 3)]  # type: ignore[arg-type]
    assert all(more > less for more, less in itertools.pairwise(totals))
    assert totals[3] == pytest.approx(16 * held.dense / 8)  # fp32: shards, their gradients, two moments


@pytest.mark.parametrize(("zero", "copies", "each"), [(2, 1, 2), (3, 1, 0), (2, 2, 2 + 4 / 4), (3, 2, 4 / 4)])
def test_shards_on_the_host(zero: Zero, copies: int, each: float) -> None:
    """ZeRO-2's 16-bit weights stay, and gradients that HSDP's two copies of four shards add up over a step."""
    layout = Candidate(dp=8, zero=zero, copies=copies, precision="bf16")
    held = BlockStack(named("llama3_8b")).held(layout, 0)
    software = sharded(replace(OURS, main_param_bytes=0, moment_bytes=0, host_state=1.0), zero)
    assert states(held, layout, software).total == pytest.approx(each * held.dense)
