"""How many GPUs, of which cluster: the fewest that hold a model, what would do, what the same money buys."""

import dataclasses
import itertools
import random
import re
from pathlib import Path

import pytest

from campaign import param
from models.config import ModelConfig
from tools import clusters
from tools.plan.__main__ import main
from tools.plan.search.enumeration import candidates
from tools.plan.search.gpu_counts import EVERY_NODE, LARGEST, fewest, fits, gpu_counts
from tools.plan.search.pricing import price
from tools.plan.search.request import PlanRequest

LLAMA = "--model llama3_70b --seq_length 8192".split()


def question(model: str, cluster: str, gpus: int, batch: int, seq: int, **fixed: int | str) -> PlanRequest:
    return PlanRequest(
        model=ModelConfig(shape=model, seq_length=seq), cluster=clusters.load(cluster), num_gpus=gpus,
        global_batch_size=batch, fixed=fixed,
    )  # fmt: skip


def printed(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main([*_subcommand(flags), *LLAMA, *flags]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main([*_subcommand(flags), *LLAMA, *flags]) == 2
    return capsys.readouterr().err


def _subcommand(flags: tuple[str, ...]) -> list[str]:
    return ["size"] if "--show" in flags else []


def rows(text: str) -> dict[str, list[str]]:
    """Cells of each cluster's line."""
    cells = [line.split() for line in text.splitlines() if line.startswith("  ")]
    return {row[0]: row for row in cells[1:]}


def test_gpus_come_in_whole_nodes() -> None:
    for name in ("h100_ib", "gb200"):
        node, counts = clusters.load(name).node.gpus_per_node, list(gpu_counts(clusters.load(name)))
        assert [count for count in counts if count < node] == [size for size in (1, 2, 4) if size < node]
        whole = [count // node for count in counts if count >= node]
        assert all(count % node == 0 for count in counts if count >= node)
        assert whole[:EVERY_NODE] == list(range(1, EVERY_NODE + 1)) and LARGEST * 7 / 8 < whole[-1] * node <= LARGEST
        assert all(after <= before * 9 / 8 for before, after in itertools.pairwise(whole[EVERY_NODE - 1 :]))


@pytest.mark.parametrize("count", [6, param(16)])
@pytest.mark.campaign
def test_the_leanest_layouts_tell_whether_any_fits(count: int) -> None:
    """Asked of them alone, thousands of numbers of GPUs are looked at in a second; here all layouts are asked."""
    chosen, answers = random.Random(3), []
    for _ in range(count):
        model, seq = chosen.choice([("llama3_70b", 8192), ("mixtral_8x7b", 4096), ("gpt3_175b", 2048)])
        axes: dict[str, list[int | str]] = {
            "tp": [1, 2, 8], "pp": [1, 4, 6], "mbs": [1, 2], "recompute": ["none", "full"], "vpp": [1, 2],
            "zero": [0, 1, 3],
        }  # fmt: skip
        fixed = {name: chosen.choice(values) for name, values in axes.items() if chosen.random() < 0.2}
        cluster, gpus = chosen.choice(["h100_ib", "a100_40_ib", "gb300"]), chosen.choice([8, 16, 24, 32, 40, 64])
        asked = question(model, cluster, gpus, chosen.choice([64, 120]), seq, **fixed)
        answers.append(any(plan.fits for plan in price(asked, candidates(asked))))
        assert fits(asked) == answers[-1], asked
    assert count / 4 < sum(answers) < 3 * count / 4


@pytest.mark.campaign
def test_the_smallest_cluster_is_not_a_power_of_two(capsys: pytest.CaptureFixture[str]) -> None:
    asked = question("llama3_70b", "h100_ib", 64, 1024, 8192)
    assert fewest(asked) == 24
    below = [count for count in gpu_counts(asked.cluster) if count < 24]
    assert not any(fits(dataclasses.replace(asked, num_gpus=count)) for count in below)
    few = "--num_gpus 64 --global_batch_size 1024 --zero 1 --mbs 1 --vpp 1 --show smallest"
    text = printed(capsys, *few.split())
    found = rows(text)
    assert found["h100_ib"][1] == "24" and set(found) >= set(clusters.known_clusters())
    assert "tried: parts of a node, every whole number of nodes up to 256" in text
    assert "up to 65,536 GPUs" in printed(
        capsys, *"--num_gpus 8 --global_batch_size 8 --tp 1 --pp 1 --recompute none --show smallest".split()
    )


def test_the_number_of_gpus_that_would_do_does(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--model", "llama31_405b", "--global_batch_size", "256", "--tp", "4", "--zero", "1")
    text = refused(capsys, *asked, "--num_gpus", "64")
    (count,) = re.findall(r"safe\. ([\d,]+) GPUs would do with --tp 4 and --zero 1\.", text)
    assert main([*LLAMA, *asked, "--num_gpus", count]) == 0
    assert "fits nowhere" in refused(capsys, *asked, "--num_gpus", f"{int(count) - 8}")


@pytest.mark.parametrize("gpus", ["16", "32"])
def test_constraints_under_which_nothing_ever_fits_are_named(capsys: pytest.CaptureFixture[str], gpus: str) -> None:
    asked = ("--num_gpus", gpus, "--global_batch_size", "64", "--pp", "1", "--zero", "1")
    text = refused(capsys, *asked, "--tp", "1")
    most = f"{64 * int(gpus):,}"
    assert f"No number of GPUs up to {most} would do with --tp 1, --pp 1 and --zero 1. Lift --zero: then " in text
    assert main([*LLAMA, *"--num_gpus 32 --global_batch_size 64 --tp 1 --pp 1".split()]) == 0


def test_more_samples_are_asked_for_only_where_they_must(capsys: pytest.CaptureFixture[str]) -> None:
    text = refused(capsys, *"--num_gpus 8 --global_batch_size 8 --tp 8 --pp 1 --cp 1 --zero 1".split())
    (count, batch) = re.findall(r"([\d,]+) GPUs and --global_batch_size (\d+) would do", text)[0]
    assert main([
        *LLAMA, "--num_gpus", count, "--global_batch_size", batch, *"--tp 8 --pp 1 --cp 1 --zero 1".split()
    ]) == 0  # fmt: skip


@pytest.mark.campaign
def test_the_same_money_buys_whole_nodes_and_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    asked = "--num_gpus 96 --global_batch_size 1152 --mbs 1 --vpp 1 --zero 1 --show clusters"
    found = rows(printed(capsys, *asked.split()))
    assert found["h100_ib"][1] == "96" and float(found["h100_ib"][2]) == pytest.approx(239, abs=0.5)
    for name, row in found.items():
        cluster = clusters.load(name)
        assert int(row[1]) % cluster.node.gpus_per_node == 0
        assert float(row[2]) == pytest.approx(int(row[1]) * cluster.price.usd_per_gpu_hour, rel=1e-3)
        assert 120 < float(row[2]) <= float(found["h100_ib"][2])
    rates = [float(row[4]) for row in found.values()]
    assert len(rates) > 5 and rates == sorted(rates, reverse=True)


def test_a_cluster_of_ones_own_is_sized_as_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (clusters.FOLDER / "h100_ib.toml").read_text()
    text = re.sub(r"(?m)^source = .*$", 'source = "not known: write yours"', text)
    mine = tmp_path / "mine.toml"
    mine.write_text(re.sub(r"(?m)^usd_per_gpu_hour = .*$", "usd_per_gpu_hour = 1.0", text))
    asked = ("--cluster", str(mine), *"--num_gpus 36 --global_batch_size 72 --mbs 1 --show clusters".split())
    text = printed(capsys, *asked)
    assert rows(text)["mine"][1:3] == ["36", "36"] and "mine: its price is not known" in text
    assert "one node costs more: gb300" in text or "one node costs more: b200_ib" in text


@pytest.mark.campaign
def test_money_that_buys_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    text = refused(
        capsys, "--cluster", "t4_ethernet", "--num_gpus", "64", "--global_batch_size", "1024", "--show", "clusters"
    )  # fmt: skip
    assert "fits on nothing that" in text and "64 GPUs of t4_ethernet" in text and "size --show smallest" in text
