"""What is offloaded must fit into the memory of its node."""

import dataclasses
from pathlib import Path

import pytest

from models.costs.candidate import Candidate
from models.costs.parameters import num_parameters
from models.costs.predict import of_stages
from program.errors import UserError
from tests.tools.plan.test_layouts import question
from tests.tools.plan.test_switches import plan_of
from tools.plan.report.table import details, switches, verdict
from tools.plan.run import planned
from tools.plan.search.gpu_counts import fewest
from tools.plan.search.pricing import holdable, price
from tools.plan.search.recipe import configuration, write
from tools.plan.search.request import PlanRequest
from tools.plan.search.switches import activations_on_the_host, kept_on_the_host, modules_on_the_host, switched
from training.memory.planned import as_case, planned_modules

GIB = 2**30
SHARDS = Candidate(dp=8, microbatches=8, zero=3, recompute="full")


def with_node(asked: PlanRequest, memory_gib: float) -> PlanRequest:
    """On nodes with so much memory."""
    node = dataclasses.replace(asked.cluster.node, memory_gib=memory_gib)
    return dataclasses.replace(asked, cluster=dataclasses.replace(asked.cluster, node=node))


def offloading() -> PlanRequest:
    """A model whose state a node's GPUs cannot hold, and which takes half of its host: 1,052 GiB of 1,900."""
    return kept_on_the_host(question("llama3_70b", gpus=8, batch=64, seq=8192))


@pytest.mark.parametrize("layout", [
    SHARDS, Candidate(tp=2, pp=2, dp=2, microbatches=32, zero=1), Candidate(pp=4, dp=2, microbatches=32, zero=1),
])  # fmt: skip
def test_a_plan_offloads_what_its_recipe_does(layout: Candidate) -> None:
    asked = activations_on_the_host(offloading(), layout)
    config = configuration(asked, layout)
    assert config.problems(8) == []
    stages = of_stages(as_case(config, 8, asked.shape, planned_modules(config)), asked.shape, range(layout.pp))
    plan = plan_of(asked, layout)
    assert plan.host_bytes == pytest.approx(max(stage.host for stage in stages), rel=1e-9)
    states = plan_of(offloading(), layout)
    assert states.host_bytes > 16 * num_parameters(asked.shape) / 8 * 0.99
    assert plan.host_bytes > states.host_bytes + GIB


@pytest.mark.parametrize("name, layout", [
    ("llama3_8b", Candidate(tp=2, dp=4, microbatches=16)),
    ("qwen3_30b_a3b", Candidate(ep=8, dp=8, microbatches=8)),
    ("deepseek_v2_lite", Candidate(ep=8, dp=8, microbatches=8)),
])  # fmt: skip
def test_modules_are_offloaded_as_their_recipe_does(name: str, layout: Candidate) -> None:
    """Less on the card and more on the host. Over PCIe a block of experts is shorter than its bytes travel, a dense one
    longer; NVLink-C2C hides more."""
    asked = question(name, gpus=8, batch=64, seq=8192)
    plan = plan_of(asked, layout)
    found = {words: (other, accepted) for words, other, accepted in switched(asked, plan)}
    other, accepted = found["modules on the host"]
    away = modules_on_the_host(asked, layout)
    config = configuration(away, layout)
    assert accepted and config.problems(8) == [] and config.train.offload_modules == away.offload_modules
    assert {"core_attn", "attn_proj", "qkv_linear"} <= set(away.offload_modules)
    assert ("expert_fc1" in away.offload_modules) == bool(asked.shape.num_moe_experts)
    stages = of_stages(as_case(config, 8, asked.shape, planned_modules(config)), asked.shape, range(layout.pp))
    fullest = max(stages, key=lambda stage: stage.total)
    assert other.total_bytes == pytest.approx(fullest.total, rel=1e-9)
    assert other.host_bytes == pytest.approx(max(stage.host for stage in stages), rel=1e-9)
    assert 0 < plan.total_bytes - other.total_bytes < other.host_bytes
    assert (other.spent_s["offload"] > 0) == bool(asked.shape.num_moe_experts) and plan.spent_s["offload"] == 0
    near = question(name, "gb200", gpus=8, batch=64, seq=8192)
    (there,) = price(modules_on_the_host(near, layout), [layout])
    assert there.spent_s["offload"] <= other.spent_s["offload"] / 2


def test_it_fits_where_card_and_host_have_the_room(tmp_path: Path) -> None:
    asked, poor = offloading(), with_node(offloading(), 1600)
    plan, short = plan_of(asked, SHARDS), plan_of(poor, SHARDS)
    assert plan.fits and short.fits_card and not short.fits_host and not short.fits
    assert price(asked, [SHARDS], keep=1) and not price(poor, [SHARDS], keep=1)
    assert holdable(asked, [SHARDS]) and not holdable(with_node(asked, 1200), [SHARDS])
    assert verdict(plan) == [] and "131.4 GiB of a rank in the host's memory" in verdict(short)[0]
    write(tmp_path / "short.toml", poor, short)
    assert ", 131 GiB a rank in the host's memory: more than is safe" in (tmp_path / "short.toml").read_text()
    assert details(plan)[-1] == "in the host's memory: 131.4 GiB of each rank's share of 238"


def test_a_switch_that_overfills_the_host_says_so() -> None:
    asked = with_node(question("llama3_8b", gpus=8, batch=64, seq=8192), 60)
    plan = plan_of(asked, Candidate(dp=8, microbatches=8, zero=3))
    (line,) = [each for each in switches(plan, switched(asked, plan)) if each.lstrip().startswith("shards on the host")]
    assert line.endswith("does not fit the host")


def test_more_nodes_are_asked_for_where_the_hosts_are_too_small() -> None:
    poor = with_node(offloading(), 1200)
    with pytest.raises(UserError, match=r"leaves 1\d\d GiB of each rank to the host's memory; of 150 GiB, .* 60% are"):
        planned(poor, 1, None)
    assert fewest(offloading()) == 8 < (fewest(poor) or 0)
