"""Which layout is offered: one answer however it is asked for, and one that the program runs."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from models.costs.candidate import Candidate
from program.errors import UserError
from tests.tools.plan.test_layouts import question
from tests.tools.plan.test_plan import printed, refused
from tools.plan.__main__ import main
from tools.plan.report.page import scaled
from tools.plan.search import sizing
from tools.plan.search.enumeration import candidates
from tools.plan.search.pricing import PricedLayout, price
from tools.plan.search.ranking import CLOSE, complexity, distinct, ranked
from tools.plan.search.recipe import configuration, problems, write
from tools.plan.search.request import PlanRequest
from tools.plan.search.selection import best, fitting
from training.config.recipe import load
from training.config.run_config import RunConfig
from training.config.train_config import TrainConfig

ROOT = Path(__file__).resolve().parents[3]
RAMPED = RunConfig(train=TrainConfig(global_batch_size=512, rampup_batch_size=(16, 16, 1_000_000)))


def like(plan: PricedLayout, step_s: float, **changes: int | str) -> PricedLayout:
    return dataclasses.replace(plan, step_s=step_s, layout=dataclasses.replace(plan.layout, **changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plan() -> PricedLayout:
    asked = question("llama3_8b", tp=2, pp=1, cp=1, mbs=1, precision="bf16", recompute="none", zero=1)
    return price(asked, candidates(asked))[0]


def test_of_plans_as_fast_the_simplest_comes_first(plan: PricedLayout) -> None:
    involved, simple = like(plan, 1.0, pp=4, vpp=10), like(plan, 1 + CLOSE / 2, pp=4)
    assert ranked([involved, simple]) == [simple, involved]


@pytest.mark.parametrize(
    "simple, involved",
    [
        ({"pp": 4, "vpp": 8}, {"pp": 4, "vpp": 16}),
        ({"tp": 4, "pp": 16, "vpp": 4, "cp": 2}, {"tp": 4, "pp": 64}),
        ({"tp": 4, "pp": 4, "cp": 2}, {"tp": 4, "pp": 4, "vpp": 10, "cp": 2}),
        ({"ep": 8}, {"ep": 64}),
        ({"pp": 4}, {"pp": 4, "split": "ends"}),
        ({"recompute": "none"}, {"recompute": "full"}),
        ({"precision": "bf16"}, {"precision": "fp8"}),
        ({"zero": 1}, {"zero": 3}),
        ({"zero": 3}, {"zero": 3, "copies": 4}),
    ],
    ids=str,
)
def test_complexity_grows_with_the_sizes(
    plan: PricedLayout, simple: dict[str, int | str], involved: dict[str, int | str]
) -> None:
    assert complexity(like(plan, 1.0, **simple)) < complexity(like(plan, 1.0, **involved))


@pytest.mark.campaign
def test_every_way_of_asking_gets_the_same_layout(capsys: pytest.CaptureFixture[str]) -> None:
    asked = question("llama3_8b", gpus=32, batch=128, seq=8192, zero=1, mbs=1)
    own = best(asked)
    assert own is not None and own == fitting(asked, candidates(asked))[0]
    runnable = [plan for plan in price(asked, candidates(asked), keep=100) if plan.fits]
    fastest = min(runnable, key=lambda plan: plan.step_s)
    close = [plan for plan in runnable if plan.step_s <= fastest.step_s * (1 + CLOSE)]
    assert len(close) > 1 and own.layout == min(close, key=lambda plan: (complexity(plan), plan.step_s)).layout
    flags = "--model llama3_8b --num_gpus 32 --global_batch_size 128 --seq_length 8192".split()
    flags += "--zero 1 --mbs 1".split()
    sized = printed(capsys, "size", *flags, "--show", "clusters").splitlines()
    sizing = next(line for line in sized if " h100_ib " in line)
    assert sizing.endswith(str(own.layout))
    assert f"{own.layout}: {own.step_s:.4g} s a step" in printed(capsys, *flags)
    assert "This is the layout that is offered first" in printed(capsys, "explain", f"tp={own.layout.tp}", *flags)


@pytest.mark.campaign
def test_one_row_for_layouts_that_differ_in_their_stages_alone(plan: PricedLayout) -> None:
    first = like(plan, 1.0, pp=4)
    alike = [like(first, 1 + CLOSE / 2, vpp=size) for size in (2, 4, 8)]
    slower, other = like(first, 1.5, recompute="full"), like(first, 1.01, mbs=2)
    assert distinct([first, *alike, slower, other]) == [first, slower, other]
    asked = question("qwen3_235b_a22b", "gb200", gpus=256, batch=1536, zero=1, precision="bf16")
    plans = fitting(asked, candidates(asked))
    assert len({(x.tp, x.pp, x.cp, x.ep, x.mbs) for x in (plan.layout for plan in distinct(plans)[:5])}) == 5
    assert len({(x.tp, x.pp, x.cp, x.ep, x.mbs) for x in (plan.layout for plan in plans[:5])}) < 5


@pytest.mark.campaign
def test_windows_reach_all_context_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "windowed.toml"
    flags = "--model mistral_7b --num_gpus 64 --global_batch_size 16 --seq_length 32768 --write".split()
    printed(capsys, *flags, str(path))
    parallel = load(path).parallel
    assert parallel.context_parallel_size > 1 and parallel.cp_comm_type == "all_gather"
    done = subprocess.run(
        [sys.executable, "pretrain_gpt.py", str(path), "--dry_run", "--world_size", "64"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("model", ["mistral_7b", "deepseek_v3", "llama3_8b"])
def test_every_context_size_is_one_that_the_program_accepts(model: str) -> None:
    asked = question(model, gpus=256, seq=32768, zero=1, mbs=1)
    for base in (None, RunConfig(parallel=dataclasses.replace(RunConfig().parallel, cp_comm_type="a2a"))):
        layouts = {layout.cp: layout for layout in candidates(asked)}
        assert set(layouts) >= {1, 2, 4, 8}
        assert [problems(asked, layout, base) for layout in layouts.values()] == [[]] * len(layouts)


def small(**fixed: int | str) -> PlanRequest:
    return question("llama3_8b", gpus=64, batch=512, seq=8192, precision="bf16", zero=1, **fixed)


def test_a_layout_is_offered_that_the_rest_of_the_recipe_accepts() -> None:
    """16 samples, the first batch, do not divide over 32 replicas."""
    free, ramped = best(small()), best(small(), RAMPED)
    assert free is not None and problems(small(), free.layout, RAMPED)
    assert ramped is not None and problems(small(), ramped.layout, RAMPED) == []


def test_slower_layouts_are_looked_at_where_the_recipe_forbids_all_fast_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = small(pp=1, cp=1)
    fastest = price(asked, candidates(asked), keep=1)
    assert [bool(problems(asked, plan.layout, RAMPED)) for plan in fastest] == [True]
    monkeypatch.setattr("tools.plan.search.selection.KEPT", 1)
    slower = best(asked, RAMPED)
    assert slower is not None and slower.step_s > fastest[0].step_s


@pytest.mark.campaign
def test_other_clusters_and_sizes_go_with_the_rest_of_the_recipe_too() -> None:
    asked = small(tp=2, pp=1, cp=1, mbs=1)
    plan = best(asked)
    assert plan is not None
    for lines in (sizing.smallest(asked, RAMPED), sizing.sizing(asked, RAMPED)):
        layouts = [re.findall(r"TP2 .*?DP(\d+)", line) for line in lines]
        assert sum(map(len, layouts)) > 3 and all(16 % int(dp) == 0 for found in layouts for dp in found)
    for world, other in scaled(asked, plan, RAMPED):
        assert other is plan or problems(dataclasses.replace(asked, num_gpus=world), other.layout, RAMPED) == []
    never = dataclasses.replace(RAMPED, train=dataclasses.replace(RAMPED.train, rampup_batch_size=(1, 1, 1000)))
    assert any("the recipe forbids every layout that fits on" in line for line in sizing.smallest(asked, never))


@pytest.mark.campaign
def test_switches_go_with_the_rest_of_the_recipe_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ramped.toml"
    path.write_text(
        '[model]\nshape = "llama3_8b"\n[train]\nglobal_batch_size = 512\nrampup_batch_size = [16, 16, 1000000]\n'
    )
    flags = ["explain", "TP=1,PP=1,CP=1,mbs=1,recompute=none,zero=0", "--recipe", str(path), "--num_gpus", "32"]
    rows = printed(capsys, *flags).partition("the same with one switch the other way:\n")[2]
    assert next(line for line in rows.splitlines() if "ZeRO-1" in line).endswith("refused")
    alone = "--model llama3_8b --global_batch_size 512 --seq_length 4096".split()
    assert "refused" not in printed(capsys, *flags[:2], *alone, *flags[4:])


def test_what_does_not_fit_is_written_with_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "large.toml"
    flags = "--model llama3_70b --num_gpus 64 --global_batch_size 64 --seq_length 8192".split()
    assert main(["explain", "TP=8,PP=1,recompute=none,mbs=2,zero=1", *flags, "--write", str(path)]) == 0
    said = capsys.readouterr()
    assert "rejected:" in said.out and "does not fit" in said.err
    assert "may run out of memory" in path.read_text().partition("device")[0] and load(path).problems(64) == []


def test_what_the_program_refuses_is_not_written(tmp_path: Path) -> None:
    plan = best(small())
    assert plan is not None
    with pytest.raises(UserError, match=r"would refuse this layout.*\n.*rampup_batch_size"):
        write(tmp_path / "refused.toml", small(), plan, RAMPED)
    assert not list(tmp_path.iterdir())


def test_a_recipe_that_forbids_every_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ramped.toml"
    path.write_text(
        '[model]\nshape = "llama3_8b"\n[train]\nglobal_batch_size = 512\nrampup_batch_size = [16, 16, 1000000]\n'
    )
    flags = ["--recipe", str(path), "--num_gpus", "64"]
    text = refused(capsys, *flags, "--dp", "32", "--tp", "2")
    assert "the recipe forbids every layout" in text and "rampup_batch_size" in text and "fewer constraints" in text
    written = tmp_path / "written.toml"
    printed(capsys, *flags, "--write", str(written))
    assert load(written).problems(64) == []


def test_tokens_are_written_as_iterations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "long.toml"
    flags = "--model llama3_8b --num_gpus 64 --global_batch_size 512 --seq_length 8192 --tokens 1e12 --write".split()
    text = printed(capsys, *flags, str(path))
    config = load(path)
    assert config.train.train_iters == 238_419 and "238,419 steps" in text
    assert f"checkpoint.save_interval = {config.checkpoint.save_interval:,} " in text
    assert "# 60 minutes; 105 would lose least to a failure of the hardware every 781 hours" in path.read_text()
    assert "costs 0.2% of the time at most" in text
    other = tmp_path / "unknown.toml"
    printed(capsys, *flags[:-3], "--write", str(other))
    assert (load(other).train, load(other).checkpoint) == (
        dataclasses.replace(config.train, train_iters=TrainConfig().train_iters),
        RunConfig().checkpoint,
    )


def test_a_recipe_that_chose_by_its_own_budget_takes_the_planner_s_choice() -> None:
    asked = question("llama3_8b", gpus=16, batch=16)
    base = RunConfig(train=TrainConfig(recompute="auto:70GiB"))
    layout = Candidate(tp=2, dp=8, microbatches=2, recompute="full")
    assert configuration(asked, layout, base).train.recompute == "full:uniform:1"
    assert not problems(asked, layout, base)


def test_uneven_ends_are_told_apart() -> None:
    assert "ends 4/1" in str(Candidate(pp=16, split="ends", first_layers=4, last_layers=1))
