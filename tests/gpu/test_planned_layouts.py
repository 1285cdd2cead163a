"""The rows of subject planned_layouts, its verdicts on made-up numbers, and what a played rank receives."""

import dataclasses
import os
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ranks  # noqa: F401  (imports torch and megatron once)
from models.costs.candidate import Candidate
from models.costs.states import BlockStack
from models.resolve import resolve
from parallel import groups
from parallel.launch import Identity
from parallel.layout import Layout
from tests.gpu import subject_run
from tests.gpu.arrivals import filled
from tests.gpu.layout_rows import ROWS, recipe_of
from tests.gpu.machine import GpuMachine
from tests.gpu.sizes import SIZES
from tests.gpu.subject_run import SubjectRun
from tests.gpu.subjects import planned_layouts
from tests.gpu.subjects.computing import computing_s
from tools import clusters
from tools.plan.cost.cases import PricedColumns
from tools.plan.cost.step import step_times
from tools.plan.search.pricing import constants, planned_cases
from tools.plan.search.request import PlanRequest
from training.memory.planned import Modules

MODULES = Modules(cuda=True, transformer_engine=True)
H100 = GpuMachine(
    gpus=("NVIDIA H100",), capability=(9, 0), memory_gib=79.2, driver="580", versions={"transformer-engine": "2.19.0"}
)


# ---- the rows


@pytest.mark.parametrize("toy", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test_every_row_is_a_run_that_fits_one_card(name: str, toy: bool) -> None:
    config, job_size = recipe_of(ROWS[name], 8192, toy=toy)
    assert config.problems(job_size) == [] and job_size in (64, 256)
    found = planned_layouts.predicted(ROWS[name], config, job_size, MODULES)
    assert found.total < planned_layouts.SHARE * H100.memory_gib * 2**30


@pytest.mark.parametrize("name", ROWS)
def test_as_many_microbatches_as_fill_the_pipeline(name: str) -> None:
    """More of them hold no more; fewer do, or cannot be interleaved."""
    row = ROWS[name]

    def held(microbatches: int) -> float:
        config, job_size = recipe_of(dataclasses.replace(row, microbatches=microbatches), 8192, toy=False)
        return planned_layouts.predicted(row, config, job_size, MODULES).tensors

    config, job_size = recipe_of(row, 8192, toy=False)
    layout = config.layout(job_size)
    assert held(row.microbatches) == held(4 * row.microbatches)
    if layout.pp > 1 and row.stage == "fullest":
        assert held(row.microbatches // 2) < held(row.microbatches) or layout.vpp > 1


# ---- what is predicted of one stage


def cases(layout: Candidate, model: str = "llama3_8b") -> tuple[Any, Any, Any]:
    """Of llama3_8b on H100s: the case, its blocks, the constants."""
    config, _ = recipe_of(ROWS[f"{model}-zero3"], 8192, toy=False)
    batch = layout.microbatches * layout.dp
    cluster = clusters.load("h100_ib")
    asked = PlanRequest(model=config.model, cluster=cluster, num_gpus=layout.world_size, global_batch_size=batch)
    return planned_cases(asked, [layout])[0], BlockStack(asked.shape), constants(cluster)


def test_one_rank_alone_computes_what_a_step_takes() -> None:
    """Nothing is sent and no stage waits, so that this is the planner's step."""
    case, stack, known = cases(Candidate(microbatches=4))
    whole = step_times(PricedColumns([case]), known)
    (found,) = computing_s([case], [stack], [0], known)
    assert sum(found.values()) == pytest.approx(float(whole.total[0]), rel=1e-6)


def test_stages_compute_what_the_slowest_does_without_what_is_sent() -> None:
    """The last one has the output layer; all of them together are the whole model."""
    case, stack, known = cases(Candidate(tp=2, pp=4, dp=2, microbatches=4))
    found = [computing_s([case], [stack], [stage], known)[0] for stage in range(4)]
    assert found[3]["head"] > 10 * found[0]["head"] > 0 == found[1]["head"]
    times = step_times(PricedColumns([case]), known)
    sent = sum(float(getattr(times, name)[0]) for name in ("tp", "cp", "ep", "p2p", "bubble", "dp"))
    jitter = float(times.other[0]) - known.fixed_s
    slowest = max(sum(one.values()) for one in found)
    assert sent > 0 and slowest == pytest.approx(float(times.total[0]) - sent - jitter, rel=0.02)


# ---- verdicts


def subject(monkeypatch: pytest.MonkeyPatch, held: float, slow: float, machine: GpuMachine = H100) -> SubjectRun:
    """Every row holds, and takes, so many times what is predicted."""
    cluster = clusters.load("h100_ib")
    monkeypatch.setattr(planned_layouts, "loaded_cluster", lambda run, text: cluster)

    def ranks_of(measurement: str, world_size: int, environ: Any, limit_s: float, **asked: Any) -> list[Any]:
        assert (measurement, world_size) == ("pretended", 1)
        (name,) = [
            name
            for name, row in ROWS.items()
            if (found := recipe_of(row, 8192, toy=False))[1] == asked["job_size"]
            and planned_layouts.dump(found[0]) == asked["text"]
            and (row.stage == "last") == (asked["rank"] > asked["job_size"] // 2)
        ]
        config, job_size = recipe_of(ROWS[name], 8192, toy=False)
        expected = planned_layouts.predicted(ROWS[name], config, job_size, MODULES)
        step_s = sum(planned_layouts.seconds(config, job_size, expected.stage, cluster).values())
        return [{
            "step_s": slow * step_s, "updated": True, "predicted": {"tensors": expected.tensors},
            "measured": {"total": held * expected.tensors, "activations": 1.0},
        }]  # fmt: skip

    monkeypatch.setattr(subject_run, "ranks_of", ranks_of)
    earlier = {"planner": {"numbers": {"cluster": "as text"}}}
    run = SubjectRun(machine=machine, sizes=SIZES["card"], earlier=earlier)
    planned_layouts.planned_layouts(run)
    return run


def test_what_is_as_predicted_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    run = subject(monkeypatch, 1.04, 1.2)
    assert run.problems == [] and list(run.numbers["rows"]) == list(ROWS)
    assert run.headline.startswith(f"bytes within 5% in {len(ROWS)} of {len(ROWS)}, worst +4.0%")
    assert f"seconds within 8% in 0 of {len(ROWS)}, worst +20.0%" in run.headline


def test_what_is_not_is_said_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    run = subject(monkeypatch, 0.85, 1.3)
    assert len(run.problems) == 2 * len(ROWS)
    assert "llama3_70b-tp8pp4: measured bytes are -15.0% off the prediction, more than 10%" in run.problems
    assert "llama3_70b-tp8pp4: a step is +30.0% off the prediction, more than 25%" in run.problems
    no_card = dataclasses.replace(H100, driver=None)
    assert subject(monkeypatch, 0.85, 1.3, no_card).problems == []


def test_what_does_not_fit_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run = subject(monkeypatch, 1.0, 1.0, dataclasses.replace(H100, memory_gib=39.0))
    assert run.problems == [] and 0 < len(run.numbers["rows"]) < len(ROWS)
    assert any(line.startswith("deepseek_v2_lite-ep8: not run: ") for line in run.lines)


# ---- what arrives


def in_fork(work: Callable[[], None]) -> None:
    """Groups are a process's own."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def received() -> None:
    """By the calls of torch.distributed that Megatron and FSDP2 make."""
    nan = float("nan")
    with groups.pretend(Layout(dp=4), Identity(rank=1, world_size=4)), filled():
        given, piece = torch.arange(8.0), torch.full((2,), nan)
        dist.reduce_scatter_tensor(piece, given)
        assert piece.tolist() == [2, 3]
        one, other = torch.full((2,), nan), torch.full((2,), nan)
        with dist._coalescing_manager(async_ops=True) as work:
            dist.reduce_scatter_tensor(one, given)
            dist.reduce_scatter_tensor(other, given + 8)
        work.wait()
        assert (one.tolist(), other.tolist()) == ([2, 3], [10, 11])
        rows = torch.full((5, 2), nan)
        dist.all_to_all_single(rows, torch.ones(2, 2), [2, 1, 1, 1], [1, 1, 0, 0])
        assert rows.tolist() == [[1, 1]] * 5
        dist.all_to_all_single(rows, torch.empty(0, 2), [2, 1, 1, 1], [0, 0, 0, 0])
        assert rows.tolist() == [[0, 0]] * 5
        message = torch.full((64,), nan, requires_grad=True)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, message, 0)]):
            work.wait()
        assert 0.5 < message.std().item() < 1.5


def test_no_nan_arrives() -> None:
    in_fork(received)


def test_balance_is_asked_for_where_there_are_experts() -> None:
    for row in ROWS.values():
        config, _ = recipe_of(row, 8192, toy=False)
        assert bool(config.model.megatron) == any(resolve(config.model, None).moe_blocks)


def test_a_mixture_is_priced_in_balance() -> None:
    config, job_size = recipe_of(ROWS["mixtral_8x7b-tp4pp4ep8"], 8192, toy=False)
    cluster = clusters.load("h100_ib")
    shape = resolve(config.model, None)
    asked = PlanRequest(model=config.model, cluster=cluster, num_gpus=job_size, global_batch_size=16)
    (case,) = planned_cases(asked, [planned_layouts.candidate(config, job_size, shape.num_layers)])
    uneven = computing_s([case], [BlockStack(shape)], [0], constants(cluster))[0]
    assert planned_layouts.seconds(config, job_size, 0, cluster)["products"] < 0.95 * uneven["products"]
    assert np.isfinite(uneven["products"])
