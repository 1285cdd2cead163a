"""The pipeline as it is drawn: Megatron's order, every stage's own time, and the table's bubble."""

import dataclasses
import itertools
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter

import pytest

from models.config import ModelConfig
from models.costs.candidate import Candidate
from tools import clusters
from tools.plan.report.charts import COLOURS
from tools.plan.report.schedule import Seconds, schedule
from tools.plan.report.stages import StageTimeline, pass_seconds, stages
from tools.plan.report.timeline import pipeline, words
from tools.plan.search.enumeration import candidates
from tools.plan.search.pricing import PricedLayout, price
from tools.plan.search.request import PlanRequest


def priced(
    model: str, gpus: int, batch: int, seq: int, cluster: str = "a100_ib", **more: int | str
) -> tuple[PlanRequest, PricedLayout]:
    fixed: dict[str, int | str] = {"mbs": 1, "zero": 1, "recompute": "none", "precision": "bf16"}
    asked = PlanRequest(
        model=ModelConfig(shape=model, seq_length=seq), cluster=clusters.load(cluster), num_gpus=gpus,
        global_batch_size=batch, fixed=fixed | more,
    )  # fmt: skip
    plan, *_ = price(asked, candidates(asked))  # blocks dealt out as evenly as they go
    return asked, plan


def gpt3() -> tuple[PlanRequest, PricedLayout]:
    """96 microbatches in 8 stages of 12 layers; the last computes the loss as well."""
    return priced("gpt3_175b", 1024, 1536, 2048, tp=8, pp=8, cp=1, vpp=1)


def busy_s(stage: StageTimeline) -> float:
    return sum(seconds for name, seconds in stage.spent_s.items() if name != "bubble")


@pytest.mark.parametrize("layout", [Candidate(pp=4, microbatches=8), Candidate(pp=4, vpp=2, microbatches=8)], ids=str)
def test_every_pass_runs_once_and_in_order(layout: Candidate) -> None:
    chunks = layout.pp * layout.vpp
    works = schedule(layout, Seconds([1.0] * chunks, [2.0] * chunks))
    passes = Counter((work.stage, work.chunk, work.microbatch, work.backward) for work in works)
    assert set(passes.values()) == {1} and len(passes) == 4 * layout.vpp * 8 * 2
    for stage in range(4):
        own = sorted((work for work in works if work.stage == stage), key=lambda work: work.start)
        assert all(before.end <= after.start for before, after in itertools.pairwise(own))
    total, busy = max(work.end for work in works), 8 * layout.vpp * 3.0
    assert total == pytest.approx(busy + 3 * 3.0)  # (PP - 1) of one chunk: arXiv:2104.04473, section 2.2


def test_a_slow_stage_and_exchanges_delay_the_others() -> None:
    layout, forward, backward = Candidate(pp=4, microbatches=8), [1.0, 1.0, 1.0, 1.5], [2.0, 2.0, 2.0, 3.0]
    works = schedule(layout, Seconds(forward, backward))
    assert max(work.end for work in works) == pytest.approx(8 * 4.5 + 3 * 3.0)
    works = schedule(layout, Seconds(forward, backward, exchange=0.25))
    assert max(work.end for work in works) + 0.25 == pytest.approx(8 * (4.5 + 0.5) + 3 * (3.0 + 0.5))


@pytest.mark.parametrize(
    "asked, plan",
    [
        gpt3(),
        priced("gpt3_175b", 1024, 1536, 2048, tp=8, pp=8, cp=1, vpp=3),
        priced("llama31_405b", 1024, 512, 8192, "h100_ethernet", tp=8, pp=16, cp=1, vpp=1),
        priced("mixtral_8x7b", 64, 256, 4096, "h100_ib", tp=1, pp=4, vpp=1, cp=1, ep=8, etp=1, recompute="full"),
    ],
    ids=lambda value: str(value.layout) if isinstance(value, PricedLayout) else value.model.shape,
)
def test_the_slowest_stage_spends_what_the_table_says(asked: PlanRequest, plan: PricedLayout) -> None:
    """And the schedule, run pass by pass with all microbatches, takes what the closed form says."""
    found = stages(asked, plan)
    slowest = max(found, key=busy_s)
    assert slowest.spent_s == pytest.approx(plan.spent_s, rel=1e-6)
    assert sum(stage.layers for stage in found) == asked.shape.num_layers + asked.shape.mtp_num_layers
    assert all(sum(stage.spent_s.values()) == pytest.approx(plan.step_s) for stage in found)
    seconds = pass_seconds(asked, plan)
    whole = max(work.end for work in schedule(plan.layout, seconds)) + seconds.exchange
    whole += sum(plan.spent_s[name] for name in ("dp", "optimizer", "host", "other"))
    assert whole == pytest.approx(plan.step_s, rel=0.01)


def test_stages_add_gradients_up_as_the_recipe_has_it() -> None:
    asked, _ = gpt3()
    narrow = dataclasses.replace(asked, grad_reduce_in_fp32=False)
    plan, *_ = price(narrow, candidates(narrow))
    assert max(stages(narrow, plan), key=busy_s).spent_s == pytest.approx(plan.spent_s, rel=1e-6)


def test_stages_are_not_alike() -> None:
    asked, plan = gpt3()
    first, *between, last = stages(asked, plan)
    assert last.spent_s["head"] > 20 * first.spent_s["head"] > 0 == between[0].spent_s["head"]
    assert last.share("bubble") == pytest.approx(plan.bubble) and between[0].share("bubble") > 1.2 * plan.bubble
    asked, plan = priced("llama31_405b", 1024, 512, 8192, tp=8, pp=16, cp=1, vpp=1, recompute="full")
    found = stages(asked, plan)
    assert [stage.layers for stage in found] == [7, *[8] * 14, 7]
    assert found[0].share("bubble") > found[1].share("bubble")


def test_the_picture_tells_bubble_and_communication_of_each_stage() -> None:
    asked, plan = gpt3()
    passes, shares = (ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", pipeline(asked, plan), re.S))
    printed = [f"bubble {stage.share('bubble'):.1%}" for stage in stages(asked, plan)]
    assert printed[-1] == f"bubble {plan.bubble:.1%}"
    assert [text.text for text in passes.iter("text") if str(text.text).startswith("bubble")] == printed
    assert sum("communication" in str(text.text) for text in shares.iter("text")) == 8
    tips = " ".join(str(tip.text) for tip in passes.iter("title"))
    assert tips.count("forward of") == tips.count("backward of") == 8 * 24 and tips.count("dp:") == 8
    assert "24 of its 96 microbatches" in words(plan)


def test_sends_are_drawn_where_they_are_seen() -> None:
    asked, plan = priced("gpt2", 16, 32, 1024, "t4_ethernet", tp=1, pp=4, cp=1, vpp=1, precision="fp16")
    drawn = ElementTree.fromstring(re.findall(r"<svg.*?</svg>", pipeline(asked, plan), re.S)[0])
    sends = [bar for bar in drawn.iter("rect") if bar.get("fill") == COLOURS["p2p"]]
    assert len(sends) == 4 * 8 * 2 + 1  # and the legend's
    assert "with all 8 microbatches" in words(plan)


def test_of_many_stages_the_first_and_the_last_are_drawn() -> None:
    asked, plan = priced("llama31_405b", 512, 128, 8192, tp=8, pp=32, cp=1, vpp=1, recompute="full")
    picture = pipeline(asked, plan)
    assert "stage 7: " in picture and "stage 24: " in picture and "stage 31: " in picture
    assert "stage 8: " not in picture and "Of 32 stages" in words(plan)
