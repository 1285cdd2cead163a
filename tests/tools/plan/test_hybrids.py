"""Prices of hybrids: letter by letter, stages by what their letters take."""

import dataclasses

import numpy as np
import pytest

from models.config import ModelConfig
from models.costs.candidate import Candidate
from models.costs.sizes import sizes
from models.costs.states import BlockStack
from models.families import named
from models.shapes import GPTShape
from tests.planner.rows import PUBLISHED, read
from tests.planner.validation import predicted_s
from tools import clusters
from tools.plan.cost.cases import PricedCase, PricedColumns
from tools.plan.cost.constants import fitted, interval
from tools.plan.cost.hardware import machine
from tools.plan.cost.kinds import dealt
from tools.plan.cost.sharding import rank_parameters
from tools.plan.cost.step import StepTimes, step_times
from tools.plan.search.enumeration import candidates
from tools.plan.search.pricing import program
from tools.plan.search.recipe import problems
from tools.plan.search.request import PlanRequest

CARDS = clusters.load("h100_ib")
HYBRID = named("nemotron_h_8b")
ALONE = Candidate(tp=2, dp=32, microbatches=24)
TWO_STAGES = Candidate(tp=2, pp=2, dp=16, microbatches=48)


def case(shape: GPTShape, layout: Candidate = ALONE) -> PricedCase:
    model = sizes(shape, 8192)
    return PricedCase(model=model, layout=layout, machine=machine(CARDS, layout.precision), software=program(CARDS))


def priced(shape: GPTShape, layout: Candidate = ALONE) -> StepTimes:
    return step_times(PricedColumns([case(shape, layout)]), fitted())


def pattern(letters: str) -> GPTShape:
    return dataclasses.replace(HYBRID, hybrid_layer_pattern=letters, num_layers=len(letters))


@pytest.mark.parametrize("layout", [ALONE, TWO_STAGES, Candidate(tp=4, cp=2, dp=8, microbatches=96)])
def test_letters_of_attention_and_mlp_cost_what_their_blocks_do(layout: Candidate) -> None:
    """A pattern's letters go the way of hybrids, blocks the way of all other models."""
    llama = named("llama3_8b")
    letters = dataclasses.replace(llama, hybrid_layer_pattern="*-" * 32, num_layers=64)
    blocks, found = priced(llama, layout), priced(letters, layout)
    assert dealt([case(letters, layout)]) and not dealt([case(llama, layout)])
    for name in StepTimes.__slots__:
        np.testing.assert_allclose(getattr(found, name), getattr(blocks, name), rtol=1e-9, atol=1e-9, err_msg=name)


def test_a_stage_takes_as_long_as_its_own_letters() -> None:
    """The same letters, dealt evenly or all MLPs behind all attention, differ only where there are stages."""
    even, apart = pattern("*-" * 12), pattern("*" * 12 + "-" * 12)
    np.testing.assert_allclose(priced(even).total, priced(apart).total, rtol=1e-9)
    assert priced(apart, TWO_STAGES).total[0] > 1.1 * priced(even, TWO_STAGES).total[0]
    counts = dealt([case(apart, TWO_STAGES), case(even)])
    assert counts["*"].tolist() == [[12, 0], [12, 0]] and counts["-"].tolist() == [[0, 12], [12, 0]]


def test_the_longest_of_the_stages_between_sets_the_pace() -> None:
    layout = Candidate(tp=1, pp=4, dp=16, microbatches=48)
    light, heavy = pattern("*-" * 48), pattern("*-" * 12 + "-" * 24 + "*" * 24 + "*-" * 12)
    assert priced(heavy, layout).total[0] > 1.05 * priced(light, layout).total[0]


def test_a_scan_grows_with_its_states_and_its_projections_do_not() -> None:
    wide = dataclasses.replace(HYBRID, mamba_state_dim=256, mamba_num_groups=4)  # groups x states as before
    before, after = priced(HYBRID), priced(wide)
    assert after.attention[0] > 1.3 * before.attention[0] and after.traffic[0] > before.traffic[0]
    np.testing.assert_allclose(after.products, before.products, rtol=1e-9)


@pytest.mark.parametrize("letters", ["M", "G"])
def test_a_scan_takes_no_longer_per_token_of_a_longer_sequence(letters: str) -> None:
    shape = pattern(letters * 24)
    short, long = (
        step_times(PricedColumns([dataclasses.replace(case(shape), model=sizes(shape, length))]), fitted())
        for length in (8192, 32768)
    )
    assert short.attention[0] > 0 and long.attention[0] < 4.01 * short.attention[0]
    assert long.products[0] < 4.01 * short.products[0]


@pytest.mark.parametrize("name", ["nemotron_h_8b", "nemotron3_nano_30b_a3b", "qwen3_next_80b_a3b", "mamba2_2_7b"])
def test_parameters_that_are_reduced_are_those_that_memory_counts(name: str) -> None:
    shape, layout = named(name), Candidate(dp=64, microbatches=12)
    found, held = rank_parameters(PricedColumns([case(shape, layout)])), BlockStack(shape).held(layout, 0)
    tables = shape.vocab_size * shape.hidden_size * shape.tied  # priced as two, which hardly takes time
    np.testing.assert_allclose(found.dense[0] - tables, held.dense, rtol=0.025)  # routers are left out
    np.testing.assert_allclose(found.expert[0], held.expert, rtol=1e-6)


def test_heads_of_mixers_are_swapped_over_context_ranks() -> None:
    mixers = pattern("M" * 24)
    assert priced(mixers).cp[0] == 0
    assert priced(mixers, Candidate(tp=1, cp=2, dp=32, microbatches=24)).cp[0] > 0


def test_layouts_keep_to_the_mixers_groups() -> None:
    """What the program refuses is not tried: TP that does not divide the groups, CP that does not divide the heads."""
    few = ModelConfig(shape="nemotron_h_8b", seq_length=8192, mamba_num_groups=2, mamba_num_heads=8)
    asked = PlanRequest(model=few, cluster=CARDS, num_gpus=64, global_batch_size=768, fixed={"precision": "bf16"})
    layouts = candidates(asked)
    assert {layout.tp for layout in layouts} == {1, 2} and {layout.recompute for layout in layouts} == {"none", "full"}
    assert max(layout.cp for layout in layouts) > 1
    assert not [problem for layout in layouts[::97] for problem in problems(asked, layout)]
    assert problems(asked, dataclasses.replace(ALONE, tp=4, dp=16, microbatches=48))


def test_published_hybrids_lie_within_the_assumed_range() -> None:
    """NVIDIA's runs of Nemotron 3 Nano, letter by letter and not as the stand-in that the fit knows."""
    nano = named("nemotron3_nano_30b_a3b")
    rows = [row for row in read(PUBLISHED) if row.text["model"] == "Nemotron_3_Nano" and row.measured_s]
    own = [
        dataclasses.replace(row, case=dataclasses.replace(row.case, model=sizes(nano, row.case.model.seq_length)))
        for row in rows
    ]
    ratios = np.array([row.measured_s for row in rows]) / predicted_s(own, fitted())
    known = interval("hybrids")
    assert len(rows) >= 15 and known.low < ratios.min() and ratios.max() < known.high
    assert ratios.min() > 1.0 and ratios.max() < 1.12 and (known.high - known.low) > 0.5
