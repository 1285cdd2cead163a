"""Subcommands: answered, or refused before anything is printed; and what a CPU and one rank do not have."""

import dataclasses
import re
from pathlib import Path

import pytest

from models.config import ModelConfig
from tools import clusters
from tools.plan.__main__ import MOVED, SUBCOMMANDS, main, subcommand
from tools.plan.calibrate.compare import compare, filled
from tools.plan.calibrate.one_rank import made_up_links
from tools.plan.flags import CompareFlags
from tools.plan.run import asked
from tools.plan.search.enumeration import candidates
from tools.plan.search.pricing import price
from tools.plan.search.request import PlanRequest

ASKED = "--model llama3_8b --cluster h100_ib --num_gpus 16 --global_batch_size 64 --seq_length 4096".split()


def test_figures_are_answered_in_the_order_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    few = "--zero 1 --mbs 1 --vpp 1 --precision bf16".split()
    assert main(["size", *ASKED, *few]) == 0
    text = capsys.readouterr().out
    places = [text.index(word) for word in ("ZeRO-3", "the fewest GPUs", "M tokens per USD")]
    assert places == sorted(places)
    assert main(["size", *ASKED, "--show", "memory"]) == 0
    assert "the fewest GPUs" not in capsys.readouterr().out


def test_every_subcommand_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for name in SUBCOMMANDS:
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0
        assert f"python -m tools.plan {name} [-h]" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = capsys.readouterr().out
    assert "python -m tools.plan [-h]" in listed
    assert all(f"    {name} " in listed for name in SUBCOMMANDS)


def test_search_is_what_is_done_without_a_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for argv in (ASKED, ["search", *ASKED]):
        assert main(argv) == 0
        texts.append(re.sub(r"in [0-9.]+ s", "", capsys.readouterr().out))
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "flags, words",
    [
        (["backtest", "x.csv", "--memory"], ["--memory"]),
        (["calibrate", "x.toml", "--model", "gpt2"], ["--model"]),
        (["compare", "--report", "x.html"], ["--report"]),
        (["--refit"], ["--refit"]),
        (["size", "--show", "all"], ["--show"]),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_a_flag_of_another_subcommand_is_refused(
    capsys: pytest.CaptureFixture[str], flags: list[str], words: list[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
    assert all(word in capsys.readouterr().err for word in words)


def test_the_old_spelling_of_backtest_is_accepted() -> None:
    for argv in (["--backtest", "x.csv", "--output", "y.csv"], ["--output=y.csv", "--backtest=x.csv"]):
        assert subcommand(argv) == ("backtest", ["x.csv", "--output", "y.csv"])
    assert subcommand(["--model=gpt2", "--tp", "2"])[0] == "search"


def test_a_mistyped_subcommand_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explian", "TP=8", *ASKED]) == 2
    assert 'Did you mean "explain"?' in capsys.readouterr().err


@pytest.mark.parametrize("flag", sorted(MOVED))
def test_a_flag_that_became_a_subcommand_is_named(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    assert main([*ASKED, flag]) == 2
    said = capsys.readouterr()
    assert said.out == "" and f"python -m tools.plan {MOVED[flag]}" in said.err


@pytest.mark.parametrize(
    "flags, words",
    [
        (["explain", "TP8"], ['"TP8" is not one of', "TP=8,PP=4"]),
        (["explain", ""], ["is not one of"]),
        (["explain", "recompute=ful"], ["did you mean full"]),
        (["--top", "0"], ["--top must be 1 or more, found 0"]),
        (["--top", "-2"], ["--top must be 1 or more, found -2"]),
        (["trace", "--layouts", "-1"], ["--layouts", "found -1"]),
        (["--mbs", "9" * 400], ["--mbs must be at most", "found a larger number"]),
        (["--tp", str(10**9)], ["--tp must be at most", "found 1000000000"]),
        (["--tokens", "0"], ["--tokens must be above 0"]),
        (["--tokens", "inf"], ["--tokens must be above 0, and finite"]),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_what_cannot_be_answered_is_refused_before_anything_is_printed(
    capsys: pytest.CaptureFixture[str], flags: list[str], words: list[str]
) -> None:
    named = flags[:2] if flags[0] == "explain" else flags[:1] if flags[0] == "trace" else []
    assert main([*named, *ASKED, *flags[len(named) :]]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and all(word in printed.err for word in words), printed.err


def test_numbers_are_sorted_as_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, words in (
        (["--pp", "3"], "Possible: 1, 2, 4, 8, 16."),
        (["--pp", "1", "--vpp", "2"], "With VPP 2, PP can be 2, 4, 8, 16."),
    ):
        assert main([*ASKED, *flags]) == 2
        assert words in capsys.readouterr().err


@pytest.fixture
def one_rank(tmp_path: Path) -> Path:
    """As calibrate writes it on a CPU, from one rank."""
    path = tmp_path / "here.toml"
    path.write_text(
        '[gpu]\nname = "CPU x86_64"\nmemory_gib = 8.0\nmemory_gb_per_s = 10.0\npeak_tflops = {fp32 = 0.1}\n'
        "[node]\ngpus_per_node = 1\ncpus_per_node = 2\nmemory_gib = 8.0\n"
        "[fabric]\nscale_up_gb_per_s = 1.0\nscale_up_domain = 1\nscale_up_latency_us = 1.0\nkind = 'ethernet'\n"
        "nics_per_node = 1\nnic_gb_per_s = 1.0\nlatency_us = 1.0\n"
        '[price]\nusd_per_gpu_hour = 1.0\nsource = "not known: write yours"\ndate = "2026-11-22"\n'
        "[measured]\nranks = 1\nnodes = 1\n"
    )
    return path


def test_a_cpu_holds_no_workspace_of_cuda_and_nccl(one_rank: Path) -> None:
    here = PlanRequest(
        model=ModelConfig(shape="gpt2", seq_length=256), cluster=clusters.load(str(one_rank)), num_gpus=4,
        global_batch_size=8,
    )  # fmt: skip
    plans = price(here, candidates(here))
    assert plans and all(plan.held_bytes["workspace"] == 0 < plan.held_bytes["weights"] for plan in plans)
    there = dataclasses.replace(here, cluster=clusters.load("h100_ib"))
    assert all(plan.held_bytes["workspace"] > 1e9 for plan in price(there, candidates(there)))


def test_links_that_one_rank_has_made_up_are_warned_of(
    one_rank: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    two = f"--model gpt2 --cluster {one_rank} --num_gpus 2 --global_batch_size 4 --seq_length 256".split()
    assert main(two) == 0
    assert "warning: here was measured on one rank: its [fabric] is made up" in capsys.readouterr().err
    monkeypatch.setattr("tools.plan.calibrate.compare.measured_s", lambda *_: 1.0)
    compare(asked(filled(CompareFlags(cluster=str(one_rank))), None), None)
    assert "its [fabric] is made up" in capsys.readouterr().err
    known = clusters.load(str(one_rank))
    fabric = dataclasses.replace(known.fabric, scale_up_gb_per_s=12.0, nic_gb_per_s=3.0)
    assert made_up_links(dataclasses.replace(known, fabric=fabric)) is None
    assert made_up_links(clusters.load("h100_ib")) is None
