"""calibrate writes a cluster file of these ranks that the planner reads; compare holds it against real runs."""

import dataclasses
import itertools
import re
import subprocess
import types
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from doctor_nodes import free_port
from parallel import groups
from parallel.launch import Identity
from parallel.layout import Layout
from program.errors import UserError
from programs import Program
from ranks import run_ranks
from tools import clusters
from tools.plan.__main__ import main
from tools.plan.calibrate import cluster_file, collectives, compare, fit, overhead
from tools.plan.calibrate.collectives import Collective
from tools.plan.calibrate.command import launches_us
from tools.plan.calibrate.measure import Product
from tools.plan.cost.constants import Constants, fitted
from tools.plan.cost.hardware import NVLINK_SHARE
from tools.plan.cost.products import product_s
from tools.plan.search.pricing import constants

MODULE = "tools.plan"


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cluster file that two ranks write, with the environment that torchrun gives them."""
    folder = tmp_path_factory.mktemp("calibrated")
    path = folder / "here.toml"
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        Program(["calibrate", str(path)], folder / f"rank{rank}", job | {"RANK": rank, "LOCAL_RANK": rank}, MODULE)
        for rank in ("0", "1")
    ]
    (said, errors), _ = (rank.communicate() for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    assert "reduce_scatter" in said and f"written: {path}" in said
    return path


@pytest.mark.campaign
def test_two_ranks_become_a_cluster(two_ranks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = clusters.load(str(two_ranks))
    assert 0.001 < cluster.gpu.peak_tflops["fp32"] < 100 and cluster.gpu.memory_gb_per_s > 0.5
    assert (cluster.node.gpus_per_node, cluster.fabric.scale_up_domain) == (2, 2)
    found = cluster.measured["collectives"]
    assert {each["operation"] for each in found} == set(collectives.OPERATIONS)
    assert {each["bytes"] for each in found} == set(collectives.BYTES["cpu"])
    assert all(each["over"] == "node" and each["gb_per_s"] > 0 for each in found)
    assert cluster.measured["torch"] and cluster.measured["ranks"] == 2
    own = constants(cluster)
    assert 0 <= own.launch_s < 1e-3 and own.launch_s != fitted().launch_s, "measured here, not a GPU's"
    assert own.collective_s == 0, "what a collective takes beside its bytes was measured, and is in the hops"
    assert main(f"--model gpt2 --cluster {two_ranks} --num_gpus 2 --global_batch_size 4 --seq_length 512".split()) == 0
    assert "gpt2 on 2 x CPU" in capsys.readouterr().out


@pytest.mark.campaign
def test_a_run_is_held_against_its_prediction(
    two_ranks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One layout of those that are compared without --tp; few steps of the real program, which is forked here."""

    def forked(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        program = Program(list(map(str, command[2:])), tmp_path / "compared")
        said = program.communicate()
        return subprocess.CompletedProcess(command, program.returncode or 0, *said)

    monkeypatch.setattr(compare, "subprocess", types.SimpleNamespace(run=forked))
    monkeypatch.setattr(compare, "STEPS", 3)
    monkeypatch.setattr(compare, "WARM_UP", 1)
    assert main(f"compare --cluster {two_ranks} --model debug --seq_length 64 --tp 2".split()) == 0
    said = capsys.readouterr().out
    row = re.search(r"2 +TP2 PP1 DP1 MBS1, fp32 +.+? +([\d.]+) +([\d.]+) +([\d.]+)\n", said)
    assert row, said
    predicted, measured, ratio = map(float, row.groups())
    assert measured > 0 and predicted > 0 and ratio == pytest.approx(predicted / measured, abs=0.02)
    assert "median ratio" in said
    assert main(f"compare --cluster {two_ranks} --global_batch_size 3 --pp 7".split()) == 2
    assert "the constraints leave none" in capsys.readouterr().err


@pytest.mark.campaign
def test_one_rank_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "here.toml"
    first = Program(["calibrate", str(path)], tmp_path / "first", module=MODULE)
    _, errors = first.communicate()
    assert (first.returncode, errors) == (0, "")
    assert "no link was measured" in path.read_text()
    assert "collectives" not in clusters.load(str(path)).measured
    assert main(["calibrate", str(path)]) == 2
    assert "already there" in capsys.readouterr().err


def test_unknown_constants_are_named(two_ranks: Path, tmp_path: Path) -> None:
    path = tmp_path / "other.toml"
    path.write_text(two_ranks.read_text().replace("launch_s", "lunch_s"))
    with pytest.raises(UserError, match="lunch_s: no constant"):
        constants(clusters.load(str(path)))
    path.write_text(two_ranks.read_text() + 'product_bytes = "far"\n')
    path.write_text(re.sub(r"\nproduct_bytes = [\d.]+", "", path.read_text(), count=1))
    with pytest.raises(UserError, match=r"measured\.constants: expected a table of numbers"):
        clusters.load(str(path))


@pytest.mark.parametrize(("launch_s", "fixed_s"), [(3e-6, 0.02), (-1e-6, 0.02), (3e-6, -1e-4)])
def test_steps_give_back_what_they_take_beside_their_sizes(launch_s: float, fixed_s: float, two_ranks: Path) -> None:
    """Below 0, where a step is faster than its products alone were: that constant is 0, and the other one less."""
    cluster = clusters.load(str(two_ranks))
    true = dataclasses.replace(fitted(), launch_s=launch_s, fixed_s=fixed_s)
    steps = itertools.product(overhead.LAYERS, overhead.MICROBATCHES)
    found = overhead.explained({at: overhead._priced(*at, cluster, true) for at in steps}, cluster, fitted())
    if launch_s > 0 and fixed_s > 0:
        assert (found.launch_s, found.fixed_s) == pytest.approx((launch_s, fixed_s), rel=1e-6)
    elif launch_s < 0:
        assert found.launch_s == 0 < found.fixed_s < fixed_s
    else:
        assert found.fixed_s == 0 < found.launch_s < launch_s


@pytest.mark.campaign
def test_groups_within_and_between_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(collectives.BYTES, "cpu", (64, 4096))  # before the ranks are forked
    run_ranks(4, _curves)


def _curves(identity: Identity) -> None:
    """Ranks 0 and 2 on node a, 1 and 3 on node b: as SLURM numbers them with --distribution=cyclic."""
    with groups.start(Layout(dp=4), identity, device="cpu", seed=1) as ranks:
        found = collectives.curves(ranks.device, "ab"[ranks.rank % 2], ranks.rank // 2)
        mine: list[list[Collective] | None] = [None] * 4
        dist.all_gather_object(mine, found)
        launches = launches_us(identity, ranks.device)  # on a CPU they compute, too
    assert all(each == found for each in mine), "the slowest rank's times, on all"
    assert len(found) == 3 * len(collectives.OPERATIONS) * 2
    assert [each.ranks for each in found] == [2] * len(found)
    assert set(launches) == {"launch_us", "collective_launch_us"} and min(launches.values()) > 0.1


HOST = cluster_file.Host(
    name="NVIDIA H100 80GB HBM3", memory_bytes=80 * 2**30, host_gib=2000, cpus=112, ranks=16, nodes=2,
    fabric="infiniband", versions={"torch": "2.13"},
)  # fmt: skip


def _collective(over: collectives.Over, ranks: int, size: int, us: float) -> list[Collective]:
    rate = size * (ranks - 1) / ranks / us / 1e3
    names: tuple[collectives.Operation, ...] = ("all_gather", "reduce_scatter")
    return [Collective(operation=name, over=over, ranks=ranks, bytes=size, us=us, gb_per_s=rate) for name in names]


def test_links_are_such_that_the_planner_gives_what_was_measured() -> None:
    """Eight adapters of 40 GB/s, each rank's own: alone, a link is as fast as beside the others."""
    near = [*_collective("node", 8, 1000, 20.0), *_collective("node", 8, 2**28, 2**28 * 7 / 8 / 350e3)]
    far = [*_collective("nodes", 2, 1000, 15.0), *_collective("nodes", 2, 2**28, 2**28 / 2 / 40e3)]
    alone = _collective("one link", 2, 2**28, 2**28 / 2 / 40e3)
    products = [Product(dtype="bf16", m=8192, n=8192, k=8192, tflops=600.0)]
    curves = cluster_file.Curves(products=products, copy_gb_per_s=2680, collectives=[*near, *far, *alone])
    own = Constants(nics=0.8)
    cluster, kept = cluster_file.fitted_cluster(HOST, curves, own, on_cpu=False)
    assert kept == dataclasses.replace(own, collective_s=0.0), "what published runs say of GPUs stands"
    fabric = cluster.fabric
    assert fabric.scale_up_gb_per_s == pytest.approx(350 / NVLINK_SHARE["hopper"], rel=1e-3)
    assert fabric.scale_up_latency_us == pytest.approx(20 / (1 + 3), rel=1e-3)
    assert (fabric.nics_per_node, fabric.nic_gb_per_s) == (8, pytest.approx(40 / 0.8, rel=1e-3))
    assert fabric.latency_us == pytest.approx((15 - 5) / 2, rel=1e-3)
    assert (cluster.gpu.memory_gb_per_s, cluster.problems()) == (3350, [])
    host = dataclasses.replace(curves, launches_us={"launch_us": 21.0, "collective_launch_us": 60.0})
    assert cluster.node.launch_us == 13.5, "what was not measured keeps its default"
    assert cluster_file.fitted_cluster(HOST, host, own, on_cpu=False)[0].node.launch_us == 21.0
    shared = dataclasses.replace(
        curves, collectives=[*near, *far, *_collective("one link", 2, 2**28, 2**28 / 2 / 80e3)]
    )
    assert cluster_file.fitted_cluster(HOST, shared, own, on_cpu=False)[0].fabric.nics_per_node == 4


def test_products_give_back_the_peak_and_what_their_bytes_cost() -> None:
    cluster = dataclasses.replace(clusters.load("h100_ib"), name="mine")
    true = dataclasses.replace(fitted(), product_bytes=3.0)
    shapes = [(512, 512, 512), (1024, 1024, 1024), (128, 512, 512), (512, 512, 64), (64, 512, 512)]
    made = [Product(dtype="fp32", m=m, n=n, k=k, tflops=_tflops(cluster, true, m, n, k)) for m, n, k in shapes]
    found = fit.speed(made, cluster, fitted(), bytes_too=True)
    assert (found.product_bytes, found.peak_tflops) == (3.0, pytest.approx(50.0))
    kept = fit.speed(made, cluster, fitted(), bytes_too=False)
    assert kept.product_bytes == fitted().product_bytes and kept.peak_tflops < 50


def _tflops(cluster: clusters.Cluster, own: Constants, *dims: int) -> float:
    """Of a card of 50 TFLOPS, by the planner's own price of a product, but for its launch."""
    columns = fit._columns("fp32", cluster, 1)
    columns.machine.peak_flops = np.array([50e12])
    m, n, k = (np.array([float(dim)]) for dim in dims)
    seconds = product_s(columns, dataclasses.replace(own, launch_s=0.0), m, n, k)
    return float((2 * m * n * k / seconds / 1e12)[0])
