"""What is offered is legal, and what is legal is offered."""

import dataclasses
import random

import pytest

from models.config import ModelConfig
from tools import clusters
from tools.plan.enumeration import candidates, stage_choices
from tools.plan.pricing import price
from tools.plan.question import Question
from tools.plan.ranking import CLOSE, complexity, ranked
from tools.plan.recipe import problems


def question(
    model: str, cluster: str = "h100_ib", gpus: int = 64, batch: int = 256, seq: int = 4096, **fixed
) -> Question:  # type: ignore[no-untyped-def]
    return Question(
        model=ModelConfig(shape=model, seq_length=seq), cluster=clusters.load(cluster), num_gpus=gpus,
        global_batch_size=batch, fixed=fixed,
    )  # fmt: skip


@pytest.mark.parametrize(
    "asked",
    [
        question("llama3_70b", gpus=128, seq=16384),
        question("llama31_405b", gpus=512, batch=512),
        question("deepseek_v3", gpus=256, batch=512),
        question("mixtral_8x7b", "a100_ib", gpus=64),
        question("gpt2", "t4_ethernet", gpus=4, seq=1024),
        question("qwen3_30b_a3b", "gb200", gpus=72, batch=144),
    ],
    ids=lambda asked: asked.model.shape,
)
def test_the_program_accepts_every_layout_that_is_offered(asked: Question) -> None:
    legal = [layout for layout in candidates(asked) if layout.zero <= 1]
    assert len(legal) > 20
    for layout in random.Random(1).sample(legal, 20):
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


@pytest.mark.parametrize(
    "cluster, expected", [("t4_ethernet", {"fp16"}), ("a100_ib", {"bf16"}), ("gb200", {"bf16", "fp8"})]
)
def test_a_card_is_never_offered_what_it_cannot_compute(cluster: str, expected: set[str]) -> None:
    assert {layout.precision for layout in candidates(question("llama3_8b", cluster))} == expected


def test_uneven_models_find_stages() -> None:
    assert {stages.split for stages in stage_choices(126, 16)} == {"embedding_and_loss"}
    assert {stages.split for stages in stage_choices(61, 8)} == {"ends"}
    (ends,) = stage_choices(61, 8)
    assert ends.first_layers + ends.last_layers + 6 * 8 == 61 and ends.last_layers <= ends.first_layers <= 8


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
