"""What is offloaded must fit into the memory of its node."""

import dataclasses

import pytest

from models.parameters import num_parameters
from parallel.errors import UserError
from tests.tools.plan.test_layouts import question
from tools.plan.report.table import details, switches, verdict
from tools.plan.run import planned
from tools.plan.search.gpu_counts import fewest
from tools.plan.search.pricing import PricedLayout, holdable, price
from tools.plan.search.recipe import configuration
from tools.plan.search.request import PlanRequest
from tools.plan.search.switches import activations_on_the_host, kept_on_the_host, switched
from training.memory.layouts import Candidate
from training.memory.planned import planned_modules
from training.memory.predicted import of_stages

GIB = 2**30
SHARDS = Candidate(dp=8, microbatches=8, zero=3, recompute="full")


def with_node(asked: PlanRequest, memory_gib: float) -> PlanRequest:
    """On nodes with so much memory."""
    node = dataclasses.replace(asked.cluster.node, memory_gib=memory_gib)
    return dataclasses.replace(asked, cluster=dataclasses.replace(asked.cluster, node=node))


def plan_of(asked: PlanRequest, layout: Candidate) -> PricedLayout:
    (plan,) = price(asked, [layout])
    return plan


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
    stages = of_stages(config, 8, asked.shape, planned_modules(config), range(layout.pp))
    plan = plan_of(asked, layout)
    assert plan.host_bytes == pytest.approx(max(stage.host for stage in stages), rel=1e-9)
    states = plan_of(offloading(), layout)
    assert states.host_bytes > 16 * num_parameters(asked.shape) / 8 * 0.99
    assert plan.host_bytes > states.host_bytes + GIB


def test_it_fits_where_card_and_host_have_the_room() -> None:
    asked, poor = offloading(), with_node(offloading(), 1600)
    plan, short = plan_of(asked, SHARDS), plan_of(poor, SHARDS)
    assert plan.fits and short.fits_card and not short.fits_host and not short.fits
    assert price(asked, [SHARDS], keep=1) and not price(poor, [SHARDS], keep=1)
    assert holdable(asked, [SHARDS]) and not holdable(with_node(asked, 1200), [SHARDS])
    assert verdict(plan) == [] and "131.4 GiB of a rank in the host's memory" in verdict(short)[0]
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
