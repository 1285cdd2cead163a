"""Switches of activations: on the host, and recomputed where it pays. Priced by hand, held as the run predicts it."""

import dataclasses
from pathlib import Path

import pytest

from campaign import some
from models.costs.candidate import Candidate
from models.costs.flops import sublayer_flops
from models.costs.predict import of_stages
from models.costs.recompute_plan import recomputed_flops
from tests.tools.plan.test_layouts import question
from tools import clusters
from tools.plan.cost.cases import PricedColumns
from tools.plan.cost.layer import mean_block
from tools.plan.flags import RequestFlags
from tools.plan.run import asked as question_of
from tools.plan.search.enumeration import candidates
from tools.plan.search.gpu_counts import fewest
from tools.plan.search.pricing import HELD, PricedLayout, constants, planned_cases, price
from tools.plan.search.recipe import configuration, problems, write
from tools.plan.search.request import PlanRequest
from tools.plan.search.switches import activations_on_the_host, switched, within_budget
from training.config.recipe import load
from training.config.run_config import RunConfig
from training.memory.planned import as_case, planned_modules

pytestmark = pytest.mark.campaign

AWAY = "activations on the host"
DENSE = Candidate(tp=2, dp=4, microbatches=16)
KEPT_BYTES = 2 * (2 + 2) * 4096 + 2 * (4096 + 2 * 1024 + 4096) + 4 * 32 + 3 * 2 * 14336
"""A token's of a block of llama3_8b: norms' inputs and outputs; queries, keys, values, and what attention returns; its
log-sum-exp in fp32; the MLP's first product, twice as wide, and what the second reads."""
LAYOUTS = {
    "llama3_8b": DENSE,
    "llama3_70b": Candidate(tp=4, pp=4, vpp=5, dp=4, microbatches=16),
    "qwen3_30b_a3b": Candidate(ep=8, pp=4, dp=16, microbatches=16, recompute="moe"),
    "nemotron_h_8b": Candidate(tp=2, pp=2, dp=16, microbatches=16),
}


def plan_of(asked: PlanRequest, layout: Candidate) -> PricedLayout:
    return price(asked, [layout])[0]


def found(asked: PlanRequest, layout: Candidate, base: RunConfig | None = None) -> dict[str, tuple[PricedLayout, bool]]:
    return {words: (plan, accepted) for words, plan, accepted in switched(asked, plan_of(asked, layout), base)}


def held(config: RunConfig, asked: PlanRequest) -> dict[str, float]:
    """On the fullest rank, as --dry_run says it."""
    pp = config.parallel.pipeline_model_parallel_size
    stages = of_stages(as_case(config, asked.num_gpus, asked.shape, planned_modules(config)), asked.shape, range(pp))
    fullest = max(stages, key=lambda stage: stage.total)
    return {name: getattr(fullest, name) for name in HELD}


@pytest.mark.parametrize(("cluster", "rate"), [("h100_ib", 55e9), ("gb200", 1024e9 / 4)])
def test_what_travels_longer_than_a_neighbour_computes_counts(cluster: str, rate: float) -> None:
    """Over PCIe; and by NVLink-C2C as fast as a GPU's share of the host's memory."""
    asked = question("llama3_8b", cluster, gpus=8, batch=64, seq=8192)
    plan, (other, accepted) = plan_of(asked, DENSE), found(asked, DENSE)[AWAY]
    block, computes = mean_block(PricedColumns(planned_cases(asked, [DENSE])), constants(asked.cluster))
    forward, backward = float(computes[0]), float((block.total - computes)[0])
    travel = KEPT_BYTES / 2 * 8192 / rate
    out, back = max(0.0, travel - forward), max(0.0, travel - backward)
    exposed = 16 * (31 * (out + back) + out + travel)  # nothing hides the last block's way back
    assert (out > 0, back > 0) == (True, cluster == "h100_ib")
    assert accepted and other.spent_s["offload"] == pytest.approx(exposed)
    assert other.step_s - plan.step_s == pytest.approx(exposed, rel=0.01)


def test_long_sequences_hide_their_way() -> None:
    """Attention's seconds grow with the square of a sequence, its bytes do not."""
    share = {}
    for seq in (8192, 131072):
        asked = question("llama3_8b", gpus=8, batch=8, seq=seq)
        layout = Candidate(tp=8, microbatches=8)
        share[seq] = found(asked, layout)[AWAY][0].step_s / plan_of(asked, layout).step_s - 1
    assert share[131072] < 0.02 < 0.2 < share[8192]


@pytest.mark.parametrize("model", some(LAYOUTS, ("llama3_8b", "qwen3_30b_a3b", "nemotron_h_8b")))
def test_the_plan_holds_what_the_dry_run_of_its_recipe_says(model: str, tmp_path: Path) -> None:
    layout = LAYOUTS[model]
    asked = question(model, gpus=layout.world_size, batch=layout.dp * layout.microbatches, seq=8192)
    away = activations_on_the_host(asked, layout)
    for own in (away, dataclasses.replace(asked, cpu_offloading_num_layers=2)):
        plan, path = plan_of(own, layout), tmp_path / f"{own.cpu_offloading_num_layers}.toml"
        write(path, own, plan)
        config = load(path)
        assert config.train.cpu_offloading_num_layers == own.cpu_offloading_num_layers
        assert plan.held_bytes == pytest.approx(held(config, asked), rel=1e-9)
    kept, some, none = (plan_of(each, layout).held_bytes["activations"] for each in (asked, own, away))
    assert none < some < kept and found(asked, layout)[AWAY][0] == plan_of(away, layout)
    full = plan_of(asked, dataclasses.replace(layout, recompute="full"))
    assert none == pytest.approx(full.held_bytes["activations"], rel=1e-9)


def test_it_is_shown_where_it_can_be_run() -> None:
    asked = question("llama3_8b", gpus=8, batch=64, seq=8192)
    assert AWAY in found(asked, DENSE)
    assert AWAY not in found(asked, dataclasses.replace(DENSE, precision="fp8"))
    assert AWAY not in found(asked, dataclasses.replace(DENSE, recompute="full"))
    assert AWAY not in found(dataclasses.replace(asked, cuda_graphs=True), DENSE)
    assert AWAY not in found(activations_on_the_host(asked, DENSE), DENSE)
    graphed = RunConfig(model=asked.model)
    graphed = dataclasses.replace(graphed, kernels=dataclasses.replace(graphed.kernels, cuda_graph_impl="local"))
    assert AWAY not in found(asked, DENSE, graphed)


def test_a_recipe_of_its_own_is_planned_so(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(
        '[model]\nshape = "llama3_8b"\nseq_length = 8192\n[train]\nglobal_batch_size = 64\n'
        "cpu_offloading_num_layers = 8\n"
    )
    own = question_of(RequestFlags(recipe=path, cluster="h100_ib", num_gpus=8), load(path))
    assert configuration(own, DENSE, load(path)).train.cpu_offloading_num_layers == 8
    assert plan_of(own, DENSE).spent_s["offload"] > 0
    assert problems(own, dataclasses.replace(DENSE, precision="fp8"), load(path))


def test_what_keeps_too_much_on_a_gpu_may_keep_it_on_the_host() -> None:
    asked = question("llama3_8b", gpus=8, batch=8, seq=131072, tp=8, precision="bf16")
    away = dataclasses.replace(asked, cpu_offloading_num_layers=32)
    tried = [[own for own in candidates(each) if own.recompute == "none"] for each in (asked, away)]
    assert len(tried[0]) < len(tried[1])
    fits = [any(plan.fits for plan in price(*each)) for each in zip((asked, away), tried, strict=True)]
    assert fits == [False, True]


def test_none_are_fewer_gpus_than_full_recomputation_needs() -> None:
    """Why size --show smallest does not ask."""
    for asked in (question("llama3_8b", seq=32768), question("nemotron_h_8b", "a100_40_ib")):
        away = dataclasses.replace(asked, cpu_offloading_num_layers=asked.shape.num_layers)
        assert fewest(away) == fewest(asked)
        assert fewest(dataclasses.replace(away, fixed={"recompute": "none"})) == fewest(asked)


@pytest.mark.parametrize("model", some(LAYOUTS, ("llama3_8b", "nemotron_h_8b")))
def test_what_pays_is_priced_between_nothing_and_all(model: str) -> None:
    layout = dataclasses.replace(LAYOUTS[model], mbs=2 if model == "llama3_70b" else 4)
    asked = question(model, gpus=layout.world_size, batch=layout.mbs * layout.dp * layout.microbatches, seq=8192)
    plan, accepted = found(asked, layout)["recompute auto:63.6GiB"]
    none, full = (plan_of(asked, dataclasses.replace(layout, recompute=each)) for each in ("none", "full"))
    assert accepted and plan.fits and not none.fits and none.step_s < plan.step_s < full.step_s
    assert plan.step_s == pytest.approx(sum(plan.spent_s.values()))
    assert plan.tokens_per_s_per_gpu * plan.step_s == pytest.approx(none.tokens_per_s_per_gpu * none.step_s)
    config = within_budget(asked, layout)
    assert config.problems(asked.num_gpus) == [] and plan.held_bytes == held(config, asked)
    assert sum(plan.held_bytes.values()) <= 63.6 * 2**30
    flops = sum(sum(sublayer_flops(asked.shape, block, 8192)) for block in range(asked.shape.num_layers))
    again = recomputed_flops(as_case(config, asked.num_gpus, asked.shape, planned_modules(config)), asked.shape) / flops
    slower = (plan.step_s - none.step_s) / (full.step_s - none.step_s)
    assert slower == pytest.approx(again) if layout.pp == 1 else slower > again  # early stages recompute most


def test_what_pays_is_for_what_fits_with_it_and_not_without() -> None:
    asked = question("llama3_8b", gpus=8, batch=64, seq=8192)
    words = "recompute auto:63.6GiB"
    assert words not in found(asked, DENSE)
    wide = dataclasses.replace(DENSE, mbs=4, microbatches=4)
    assert words in found(asked, dataclasses.replace(wide, recompute="full"))
    assert words not in found(dataclasses.replace(asked, cuda_graphs=True), wide)
    small = dataclasses.replace(asked, cluster=clusters.load("t4_ethernet"))
    assert not [each for each in found(small, dataclasses.replace(wide, precision="fp16")) if "auto" in each]
