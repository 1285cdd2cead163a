"""What is offered is legal, and what is legal is offered."""

import dataclasses
import itertools
import random

import pytest

from campaign import param
from models.config import ModelConfig
from models.costs.candidate import Candidate, chunks
from parallel.stages import layers_per_chunk
from tools import clusters
from tools.plan.search.enumeration import candidates
from tools.plan.search.pricing import holdable, price
from tools.plan.search.ranking import CLOSE, complexity, ranked
from tools.plan.search.recipe import configuration, problems
from tools.plan.search.request import PlanRequest
from tools.plan.search.splits import stage_choices


def question(
    model: str, cluster: str = "h100_ib", gpus: int = 64, batch: int = 256, seq: int = 4096, **fixed
) -> PlanRequest:  # type: ignore[no-untyped-def]
    return PlanRequest(
        model=ModelConfig(shape=model, seq_length=seq), cluster=clusters.load(cluster), num_gpus=gpus,
        global_batch_size=batch, fixed=fixed,
    )  # fmt: skip


def question_with(asked: PlanRequest, **fixed: int | str) -> PlanRequest:
    return dataclasses.replace(asked, fixed=asked.fixed | fixed)


@pytest.mark.parametrize(
    "asked",
    [
        question("llama3_70b", gpus=128, seq=16384),
        question("llama31_405b", gpus=512, batch=512),
        param(question("deepseek_v3", gpus=256, batch=512)),
        question("mixtral_8x7b", "a100_ib", gpus=64),
        question("gpt2", "t4_ethernet", gpus=4, seq=1024),
        question("qwen3_30b_a3b", "gb200", gpus=72, batch=144),
    ],
    ids=lambda asked: asked.model.shape,
)
def test_the_program_accepts_every_layout_that_is_offered(asked: PlanRequest) -> None:
    legal = candidates(asked)
    split = [layout for layout in legal if layout.zero == 1 and asked.can_shard(layout)]
    assert len(legal) > 20
    for layout in random.Random(1).sample(legal, 40) + [dataclasses.replace(own, zero=2) for own in split[::500]]:
        assert problems(asked, layout) == []
        assert layout.world_size == asked.num_gpus
        assert layout.microbatches * layout.mbs * layout.dp == asked.global_batch_size


def test_every_axis_is_used() -> None:
    dense, experts = candidates(question("llama3_70b", seq=16384)), candidates(question("mixtral_8x7b"))
    for name in ("tp", "pp", "vpp", "cp", "dp", "mbs"):
        assert len({getattr(layout, name) for layout in dense}) > 2, name
    assert len({layout.ep for layout in experts}) == 4
    assert {layout.etp for layout in experts} > {1}
    assert {layout.recompute for layout in dense} == {"none", "mlp", "full"}
    assert {layout.recompute for layout in experts} == {"none", "moe", "full"}
    assert {layout.precision for layout in dense} == {"bf16", "fp8"}


def test_few_large_experts_are_split_further_where_every_rank_has_one() -> None:
    """Eight experts on ranks of 40 GB: EP 8 with ETP beats both alone."""
    asked = question("mixtral_8x22b", "a100_40_ib", gpus=128, zero=1)
    plans = [plan for plan in price(asked, candidates(asked)) if plan.fits]
    alone = min(plan.step_s for plan in plans if 1 in (plan.layout.ep, plan.layout.etp))
    both = [plan for plan in plans if plan.layout.ep > 1 and plan.layout.etp > 1]
    assert {plan.layout.ep for plan in both} == {8}
    assert min(plan.step_s for plan in both) < 0.95 * alone


@pytest.mark.parametrize(
    "cluster, expected", [("t4_ethernet", {"fp16"}), ("a100_ib", {"bf16"}), ("gb200", {"bf16", "fp8"})]
)
def test_a_card_is_never_offered_what_it_cannot_compute(cluster: str, expected: set[str]) -> None:
    assert {layout.precision for layout in candidates(question("llama3_8b", cluster))} == expected


@pytest.mark.parametrize("cluster, name", [("h100_ib", "fp16"), ("h100_ib", "fp32"), ("t4_ethernet", "fp32")])
def test_what_it_can_compute_is_offered_to_who_asks(cluster: str, name: str) -> None:
    asked = question("llama3_8b", cluster, precision=name)
    assert {layout.precision for layout in candidates(asked)} == {name}
    assert problems(asked, candidates(asked)[0]) == []


def test_uneven_models_find_stages() -> None:
    assert "embedding_and_loss" in {stages.split for stages in stage_choices(126, 16)}
    found = [stages for stages in stage_choices(61, 8) if stages.vpp == 1]
    assert {stages.split for stages in found} == {"ends"}
    for ends in found:
        middle, left = divmod(61 - ends.first_layers - ends.last_layers, 6)
        assert not left and ends.last_layers <= ends.first_layers <= middle


def test_a_heavy_output_layer_lightens_the_last_stage() -> None:
    heavy = {(stages.first_layers, stages.last_layers) for stages in stage_choices(61, 16, 1, head=4.0)}
    assert {(3, 2), (4, 1)} <= heavy
    beside_equal_ones = {stages.last_layers: stages.split for stages in stage_choices(32, 4, head=2.4)}
    assert beside_equal_ones[0] == "even" and beside_equal_ones[5] == "ends"
    asked = question("deepseek_v3", gpus=2048, batch=15360, tp=2, pp=16, ep=8, mbs=2, recompute="full", zero=1)
    fastest = min((plan for plan in price(asked, candidates(asked)) if plan.fits), key=lambda plan: plan.step_s)
    assert fastest.layout.last_layers == 1


def test_layers_that_divide_by_nothing_are_interleaved_all_the_same() -> None:
    found = {stages.vpp: stages.chunk_layers for stages in stage_choices(61, 8, 1, head=4.0) if stages.vpp > 1}
    assert set(found) == {2, 3, 4}  # chunks of up to 4, 3 and 2 layers
    for vpp, dealt in found.items():
        assert len(dealt) == 8 * vpp and sum(dealt) == 61
        loads = [sum(dealt[stage::8]) for stage in range(8)]
        assert loads[-1] <= 5 and max(*loads, loads[-1] + 4) == 9  # the head weighs as much as four
    assert all(stages.split != "layout" for stages in stage_choices(80, 8))
    (alone,) = (stages for stages in stage_choices(61, 16, 1, head=4.0) if stages.vpp > 1)
    assert alone.chunk_layers[-1] == 0  # a chunk of the head alone


def test_the_program_accepts_their_layout_strings() -> None:
    asked = question("deepseek_v3", "gb200", gpus=512, batch=4096, zero=1, pp=8, vpp=4)
    plan = ranked([plan for plan in price(asked, candidates(asked)) if plan.fits])[0]
    assert problems(asked, plan.layout) == [] and "Ett|(tt|)*14t|(tt|)*7t|(tt|)*7tL" in str(plan.layout)
    config = configuration(asked, plan.layout)
    assert config.parallel.pipeline_model_parallel_layout == "Ett|(tt|)*14t|(tt|)*7t|(tt|)*7tL"
    assert layers_per_chunk(config.parallel, 61) == list(plan.layout.chunk_layers)
    others = question_with(asked, vpp=1)
    plain = min((plan for plan in price(others, candidates(others)) if plan.fits), key=lambda plan: plan.step_s)
    assert plan.step_s < plain.step_s and plan.bubble < plain.bubble


@pytest.mark.parametrize("layers, pp", [(80, 2), (94, 2), (61, 2), (32, 4), (126, 16)])
def test_no_dealing_is_offered_twice(layers: int, pp: int) -> None:
    found = [
        tuple(chunks(layers, Candidate(pp=pp, **dataclasses.asdict(stages)))) for stages in stage_choices(layers, pp)
    ]
    assert len(found) == len(set(found)) > 1


def test_nothing_is_sharded_over_one_rank() -> None:
    layouts = candidates(question("llama3_70b", gpus=24, batch=96, seq=8192))
    assert {layout.dp * layout.cp for layout in layouts if layout.zero > 1} >= {2, 3}
    assert all(layout.dp * layout.cp > 1 for layout in layouts if layout.zero > 1)
    assert not candidates(question("gpt2", gpus=1, batch=8, seq=1024, zero=3))


def test_micro_batches_grow_until_memory_or_the_batch_ends() -> None:
    small = candidates(question("gpt2", gpus=8, batch=512, seq=1024))
    assert max(layout.mbs for layout in small) == 64
    large = candidates(question("llama3_70b", "t4_ethernet", gpus=64, batch=4096, tp=1, pp=2, cp=1))
    assert max(layout.mbs for layout in large) == 4
    assert {layout.recompute for layout in large if layout.mbs == 4} == {"full"}


def test_no_layout_that_fits_is_left_out_for_its_microbatch() -> None:
    """What is taken to be kept at least is no more than the memory model says."""
    asked = question("llama3_8b", "a100_ib", gpus=16, batch=64, seq=8192, zero=1)
    whole = []
    for size, again in itertools.product((1, 2, 4), ("none", "mlp", "full")):
        fixed = question_with(asked, mbs=size, recompute=again)
        whole += [plan.layout for plan in price(fixed, candidates(fixed)) if plan.fits]
    assert len(whole) > 100 and set(whole) <= set(candidates(asked))


def test_context_ranks_from_4096_tokens() -> None:
    layouts = candidates(question("llama31_405b", gpus=1024, seq=4096))
    assert {layout.cp for layout in layouts} == {1, 2}
    assert {layout.cp for layout in candidates(question("llama31_405b", gpus=1024, seq=8192))} == {1, 2, 4, 8}


def test_the_fastest_that_are_kept_are_the_fastest() -> None:
    asked = question("llama3_70b", seq=8192, recompute="full")
    layouts = candidates(asked)
    kept, everything = price(asked, layouts, keep=5), price(asked, layouts)
    large = [plan.layout for plan in everything if plan.layout.zero == 1 and not plan.fits]
    shared = [dataclasses.replace(layout, zero=2) for layout in large if layout.dp * layout.cp > 1]
    everything += price(asked, shared)
    fitting = sorted((plan for plan in everything if plan.fits), key=lambda plan: plan.step_s)
    assert [plan.layout for plan in kept] == [plan.layout for plan in fitting[:5]]
    assert all(plan in everything for plan in kept)


def test_within_two_per_cent_the_simpler_layout_wins() -> None:
    asked = question("llama3_70b", precision="bf16", zero=1)
    plans = price(asked, candidates(asked))
    simple, involved = (choose(plans, key=complexity) for choose in (min, max))
    assert complexity(simple) < complexity(involved)
    times = (1.0, 1 + CLOSE / 2), (1.0, 1 + 2 * CLOSE)
    for (fast, slow), first in zip(times, (simple, involved), strict=True):
        pair = [dataclasses.replace(involved, step_s=fast), dataclasses.replace(simple, step_s=slow)]
        assert ranked(pair)[0].layout == first.layout


def test_fixed_axes_are_kept() -> None:
    fixed = {"tp": 4, "pp": 2, "mbs": 2, "recompute": "full", "zero": 1}
    found = candidates(question("llama3_70b", **fixed))
    assert found and all(question("llama3_70b", **fixed).allows(layout) for layout in found)


@pytest.mark.parametrize(
    "asked",
    [
        param(question("deepseek_v3", gpus=256, seq=4096, mbs=1)),
        question("llama3_70b", "a100_ib", zero=1, precision="bf16"),
    ],
    ids=lambda asked: asked.model.shape,
)
def test_what_cannot_hold_its_weights_is_not_priced(asked: PlanRequest) -> None:
    layouts = candidates(asked)
    left = set(holdable(asked, layouts))
    assert len(left) < 0.9 * len(layouts)
    assert all(plan.layout in left for plan in price(asked, layouts) if plan.fits)
