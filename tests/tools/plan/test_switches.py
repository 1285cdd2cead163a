"""Switches of a layout: off makes nothing faster or smaller, and is planned, explained and written when asked for."""

import dataclasses
import random
from pathlib import Path

import pytest

from models.costs.candidate import Candidate
from tests.tools.plan.test_layouts import question
from tools.plan.__main__ import main
from tools.plan.search.enumeration import candidates
from tools.plan.search.pricing import PricedLayout, holdable, price
from tools.plan.search.recipe import configuration
from tools.plan.search.rejections import constraint
from tools.plan.search.request import PlanRequest
from tools.plan.search.switches import in_pieces, kept_on_the_host, switched
from training.config.recipe import load

ASKED = "--model llama3_8b --cluster h100_ib --num_gpus 16 --global_batch_size 64 --seq_length 4096".split()
OFF = {
    "sequence parallelism": {"sequence_parallel": False},
    "overlap": {"overlap": False},
    "the distributed optimizer": {"zero": 0},
}


@pytest.mark.parametrize(
    "asked",
    [
        question("llama3_8b", "a100_40_ib", zero=1),
        question("llama3_70b", zero=1),
        question("qwen3_30b_a3b", "gb200", zero=1),
        question("llama32_1b", "t4_ethernet", gpus=8, zero=1),
    ],
    ids=lambda asked: asked.model.shape,
)
def test_off_makes_nothing_faster_or_smaller(asked: PlanRequest) -> None:
    """Why switches that are off are not in the table unless asked for. Where the host's launches set the pace, fewer
    collectives may win: sequence parallelism has 10 of a block where all-reduces are 4."""
    layouts = [layout for layout in candidates(asked) if layout.tp > 1 and layout.dp * layout.cp > 1]
    layouts = random.Random(3).sample(layouts, min(300, len(layouts)))
    on = price(asked, layouts)
    for name, off in OFF.items():
        without = price(asked, [dataclasses.replace(layout, **off) for layout in layouts])  # type: ignore[arg-type]
        for one, other in zip(on, without, strict=True):
            assert other.step_s >= one.step_s * (1 - 1e-9) or one.spent_s["host"] > 0, (name, one.layout)
            assert other.total_bytes >= one.total_bytes * (1 - 1e-9), (name, one.layout)
        assert any(other.step_s > 1.001 * one.step_s for one, other in zip(on, without, strict=True)), name


def test_they_are_planned_and_written_when_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plain.toml"
    off = "--sequence_parallel False --overlap False --tp 2 --zero 0".split()
    assert main([*ASKED, *off, "--write", str(path)]) == 0
    assert "ZeRO-0, no overlap, no sequence parallelism" in capsys.readouterr().out
    parallel = load(path).parallel
    assert not parallel.sequence_parallel and not parallel.overlap_grad_reduce and not parallel.overlap_param_gather
    assert not parallel.use_distributed_optimizer and load(path).problems(16) == []


def test_nothing_to_switch_is_no_constraint() -> None:
    """One GPU has neither; TP 1 is the same with sequence parallelism and without."""
    alone = question("gpt2", gpus=1, batch=8, seq=1024)
    assert candidates(alone)
    for value in (True, False):
        asked = dataclasses.replace(alone, fixed={"sequence_parallel": value, "overlap": value})
        assert candidates(asked) == candidates(alone) and all(map(asked.allows, candidates(asked)))


@pytest.mark.parametrize(
    "flags, words",
    [
        (
            ["--model", "mixtral_8x7b", "--sequence_parallel", "False", "--tp", "2"],
            ["SEQUENCE_PARALLEL", "TP 2", "conflict", "TP can be 1"],
        ),
        (["explain", "overlap=2"], ["OVERLAP=2: expected 0 or 1, False or True"]),
    ],
    ids=["experts", "a-number"],
)  # fmt: skip
def test_bad_switches(capsys: pytest.CaptureFixture[str], flags: list[str], words: list[str]) -> None:
    named = flags[:2] if flags[0] == "explain" else []
    assert main([*named, *ASKED, *flags[len(named) :]]) == 2
    text = capsys.readouterr().err
    assert all(word in text for word in words)


@pytest.mark.campaign
def test_why_says_what_each_switch_is_worth(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "TP=4,PP=2,mbs=1,recompute=none,precision=bf16", *ASKED]) == 0
    text = capsys.readouterr().out.partition("the same with one switch the other way:\n")[2]
    rows = {line.strip().partition("  ")[0]: line for line in text.splitlines()}
    assert set(rows) == {
        "without sequence parallelism", "without overlap of reductions and gathers", "ZeRO-0", "ZeRO-2", "ZeRO-3",
        "recompute full", "fp8", "fp32 weights as 16 bits more", "fp32 weights as 16 bits more, moments in bf16",
        "the optimizer on the host", "logits of 1,024 tokens at a time", "activations on the host",
        "modules on the host", "with compiled blocks",
    }  # fmt: skip
    assert not any("refused" in row for row in rows.values())
    shares = [float(line.partition("%")[0].split()[-1]) for line in text.splitlines()]
    assert shares == sorted(shares) and shares[0] < 0 < shares[-1]  # fp8 first, the slowest last


def plan_of(asked: PlanRequest, layout: Candidate) -> PricedLayout:
    return price(asked, [layout])[0]


def test_split_gradients_are_reduced_for_every_microbatch() -> None:
    """ZeRO-2 is slower by that, but for a single microbatch, and takes the gradients' room."""
    asked = question("llama3_8b")
    for count, slower in ((1, False), (4, True)):
        layout = Candidate(tp=2, dp=32, mbs=1, microbatches=count)
        whole, split = plan_of(asked, layout), plan_of(asked, dataclasses.replace(layout, zero=2))
        assert (split.spent_s["dp"] > 1.5 * whole.spent_s["dp"]) == slower
        assert split.held_bytes["gradients"] < whole.held_bytes["gradients"] / 10


def test_copies_of_shards_are_gathered_near_and_added_up_once_a_step() -> None:
    """With little to compute, gathers within a node of eight are faster; each copy takes all of its room."""
    asked = question("llama3_8b", "a100_40_ib", seq=1024)
    layout = Candidate(dp=64, mbs=1, microbatches=4, zero=3)
    one, eight = plan_of(asked, layout), plan_of(asked, dataclasses.replace(layout, copies=8))
    assert eight.spent_s["dp"] < 0.9 * one.spent_s["dp"]
    assert eight.held_bytes["optimizer"] == pytest.approx(8 * one.held_bytes["optimizer"])
    once, more = (
        plan_of(asked, dataclasses.replace(layout, copies=8, microbatches=count)).spent_s["dp"] for count in (1, 2)
    )
    assert more < 1.9 * once, "the sum over copies is in both once"


def test_copies_are_tried_and_can_be_asked_for() -> None:
    asked = question("llama3_8b", gpus=64, zero=3, tp=1, pp=1, cp=1)
    assert {layout.copies for layout in candidates(asked)} == {1, 8}
    four = dataclasses.replace(asked, fixed=asked.fixed | {"copies": 4})
    assert {layout.copies for layout in candidates(four)} == {4}
    assert not candidates(dataclasses.replace(four, fixed=four.fixed | {"zero": 1}))
    found = {words for words, _, _ in switched(asked, price(asked, candidates(asked))[0])}
    assert "8 copies of the shards" in found and "without overlap of reductions and gathers" not in found


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--model llama32_1b --cluster t4_ethernet --num_gpus 8 --zero 3", "no loss scale"),
        ("--model llama3_8b --num_gpus 64 --copies 3", "cannot be split into so many. Use one of 1, 2, 4, 8"),
        ("--model llama3_8b --num_gpus 64 --copies 4 --zero 1", 'found "optim"'),
    ],
)
def test_why_nothing_is_sharded_so(capsys: pytest.CaptureFixture[str], flags: str, words: str) -> None:
    assert main([*flags.split(), "--global_batch_size", "512"]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("cluster", "changes"), [("t4_ethernet", {}), ("h100_ib", {"cuda_graphs": True})], ids=str)
def test_nothing_is_sharded_that_would_be_refused(cluster: str, changes: dict[str, bool]) -> None:
    asked = dataclasses.replace(question("llama32_1b", cluster, gpus=8), **changes)  # type: ignore[arg-type]
    layouts = candidates(asked)
    assert layouts and all(layout.zero <= 1 for layout in layouts)


@pytest.mark.parametrize("text", ["overlap=False", "OVERLAP=0", "overlap=false"])
def test_a_switch_in_words_or_numbers(text: str) -> None:
    assert constraint(f"TP=2,{text}") == {"tp": 2, "overlap": 0}


@pytest.mark.campaign
def test_gradients_are_split_where_nothing_else_lets_a_layout_fit() -> None:
    asked = question("llama3_8b", "a100_40_ib")
    plans = [plan for plan in price(asked, candidates(asked), keep=300) if plan.fits]
    split = [plan for plan in plans if plan.layout.zero == 2]
    assert split
    for plan in split:
        assert not plan_of(asked, dataclasses.replace(plan.layout, zero=1)).fits
    holds = set(holdable(asked, candidates(asked)))  # its weights and gradients, but not its activations beside them
    assert any(dataclasses.replace(plan.layout, zero=1) in holds for plan in split)
    fixed = dataclasses.replace(asked, fixed={"zero": 1})
    assert {plan.layout.zero for plan in price(fixed, candidates(fixed), keep=300)} == {1}


def test_a_switch_is_priced_as_if_it_had_been_asked_for() -> None:
    asked = question("llama3_8b")
    layout = Candidate(tp=4, dp=16, mbs=1, microbatches=16)
    found = {words: plan for words, plan, _ in switched(asked, plan_of(asked, layout))}
    off = dataclasses.replace(layout, sequence_parallel=False)
    assert found["without sequence parallelism"] == plan_of(asked, off)


def test_what_holds_less_beside_the_layout_is_priced() -> None:
    """State on the host moves over PCIe twice; a Grace is nearer than a Xeon."""
    asked = question("llama3_8b", gpus=8, batch=64, seq=8192)
    layout = Candidate(tp=2, dp=4, microbatches=16)
    plan = plan_of(asked, layout)
    found = {words: (other, accepted) for words, other, accepted in switched(asked, plan)}
    host, accepted = found["the optimizer on the host"]
    assert accepted and host.held_bytes["optimizer"] == 0 and plan.held_bytes["optimizer"] > 0
    moved = 8 * plan.held_bytes["optimizer"] / 12 / (asked.cluster.node.host_link_gb_per_s * 1e9)
    assert moved < host.step_s - plan.step_s < 4 * moved
    small, accepted = found["fp32 weights as 16 bits more, moments in bf16"]
    assert accepted and small.held_bytes["optimizer"] == pytest.approx(plan.held_bytes["optimizer"] / 2)
    pieces, accepted = found["logits of 1,024 tokens at a time"]
    assert accepted and pieces.held_bytes["activations"] < plan.held_bytes["activations"]
    grace = question("llama3_8b", "gb200", gpus=8, batch=64, seq=8192)
    there = {words: other for words, other, _ in switched(grace, plan_of(grace, layout))}
    assert there["the optimizer on the host"].spent_s["optimizer"] < host.spent_s["optimizer"] / 2


def test_shards_may_lie_on_the_host() -> None:
    """Priced as its recipe is: whose gathers and reductions travel too."""
    asked, layout = question("llama3_8b", gpus=8, batch=64, seq=8192), Candidate(dp=8, microbatches=8, zero=3)
    plan = plan_of(asked, layout)
    found = {words: (other, accepted) for words, other, accepted in switched(asked, plan)}
    assert "the optimizer on the host" not in found
    host, accepted = found["shards on the host"]
    states = [host.held_bytes[name] for name in ("weights", "gradients", "optimizer")]
    assert accepted and states == [0, 0, 0] and plan.held_bytes["optimizer"] > 0
    moved = 4 * 24 * plan.held_bytes["optimizer"] / 12 / (asked.cluster.node.host_link_gb_per_s * 1e9)
    assert moved < host.step_s - plan.step_s < 2 * moved
    half = dataclasses.replace(asked.optimizer, optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)
    assert "shards on the host" not in {
        words for words, *_ in switched(dataclasses.replace(asked, optimizer=half), plan)
    }
    written = configuration(dataclasses.replace(asked, optimizer=half), layout)
    assert written.problems(8) == [] and written.optimizer.optimizer_cpu_offload


def test_a_recipe_that_keeps_its_state_on_the_host_is_planned_so() -> None:
    asked = question("llama3_8b", gpus=8, batch=64, seq=8192)
    layout = Candidate(tp=2, dp=4, microbatches=16)
    written = configuration(kept_on_the_host(in_pieces(asked)), layout)
    assert written.optimizer.optimizer_cpu_offload and written.train.cross_entropy_chunk_tokens == 1024
    assert plan_of(kept_on_the_host(asked), layout).held_bytes["optimizer"] == 0
    assert not configuration(
        kept_on_the_host(asked), dataclasses.replace(layout, zero=0)
    ).optimizer.optimizer_cpu_offload
