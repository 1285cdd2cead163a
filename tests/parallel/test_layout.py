"""Rank numbers and coordinates, and worlds that cannot be divided."""

import dataclasses

import pytest

from parallel.config import ParallelConfig
from parallel.layout import Coordinates, Layout, layout_of, replica_size, world_problems


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, pp=2, dp=2), Layout(tp=2, cp=3, pp=4, dp=5)])
def test_every_rank_has_its_own_coordinates(layout: Layout) -> None:
    seen = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert len(set(seen)) == layout.world_size
    assert [layout.rank(at) for at in seen] == list(range(layout.world_size))


def test_megatrons_order_of_axes() -> None:
    layout = Layout(tp=2, cp=2, pp=2, dp=2)
    steps = [
        layout.rank(Coordinates(dp=0, pp=0, cp=0, tp=0)._replace(**{axis: 1})) for axis in ("tp", "cp", "dp", "pp")
    ]
    assert steps == [1, 2, 4, 8]


def test_data_parallelism_takes_what_is_left() -> None:
    parallel = ParallelConfig(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2,
        context_parallel_size=3,
    )  # fmt: skip
    assert replica_size(parallel) == 24
    assert layout_of(parallel, 96) == Layout(tp=2, cp=3, pp=4, dp=4, vpp=2, etp=2)
    assert layout_of(parallel, 96).chunks == 8
    assert world_problems(parallel, 96) == []


@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [(24, "16 or 32"), (8, "Launch 16 ranks"), (0, "Launch 16 ranks"), (-3, "Launch 16 ranks")],
)
def test_a_world_that_does_not_fit_is_told_the_nearest_that_do(world_size: int, sizes: str) -> None:
    parallel = ParallelConfig(tensor_model_parallel_size=8, pipeline_model_parallel_size=2)
    [problem] = world_problems(parallel, world_size)
    assert f"{world_size} ranks cannot be split into replicas of TP 8 x CP 1 x PP 2 = 16" in problem
    assert sizes in problem
    assert "parallel.tensor_model_parallel_size" in problem


def test_a_layout_reads_as_a_product() -> None:
    assert str(Layout(tp=2, pp=2, dp=2)) == "TP 2 x PP 2 x DP 2"
    assert str(Layout(pp=2, vpp=4, cp=2)) == "TP 1 x CP 2 x PP 2 x VPP 4 x DP 1"


def test_experts_are_taken_from_what_a_stage_has() -> None:
    parallel = ParallelConfig(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, expert_model_parallel_size=4
    )
    assert layout_of(parallel, 32).etp == 2  # not set: TP
    assert layout_of(parallel, 32).edp == 16 // (4 * 2)
    apart = dataclasses.replace(parallel, expert_tensor_parallel_size=1)
    assert (layout_of(apart, 32).etp, layout_of(apart, 32).edp) == (1, 4)
    assert world_problems(parallel, 32) == []
    (problem,) = world_problems(parallel, 24)
    assert (
        "12 ranks of a pipeline stage" in problem and "EP 4 x ETP 2 = 8" in problem and "1, 2, 3, 4, 6, 12" in problem
    )
    assert str(layout_of(parallel, 32)) == "TP 2 x PP 2 x EP 4 x ETP 2 x DP 8"
