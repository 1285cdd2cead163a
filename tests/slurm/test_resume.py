"""Real runs under slurm/pretrain.sbatch: interrupted in every way, they end with the losses of one that was not."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.submission import REPO, losses, submit
from tools.faults.private_cluster import Cluster, rank_process

ITERATIONS = 40
pytestmark = pytest.mark.timeout(600)
"""Half a minute each on an idle machine; only hanging is to be noticed here."""

ONE_RANK_A_NODE = ("--ntasks-per-node", "1")


@pytest.fixture(scope="module")
def recipe(cache_dir: Path) -> tuple[str, ...]:
    """Two pipeline stages of the debug recipe, saved every 10 iterations."""
    return (
        "slurm/recipes/debug.toml", "--device", "cpu", "--data.cache_dir", str(cache_dir),
        "--parallel.pipeline_model_parallel_size", "2", "--train.train_iters", str(ITERATIONS),
        "--checkpoint.save_interval", "10", "--train.generate_tokens", "0",
    )  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(recipe: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[float, float]]:
    """Losses of the same run without SLURM, on two local ranks, never interrupted."""
    run_dir = tmp_path_factory.mktemp("local")
    command = [sys.executable, "pretrain_gpt.py", *recipe, "--nproc", "2", "--run_dir", str(run_dir)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(losses(run_dir)) == ITERATIONS
    return losses(run_dir)


def start(cluster: Cluster, recipe: tuple[str, ...], folder: Path, **variables: str) -> int:
    """Submit a run into ``folder`` / run, one rank on each of two nodes."""
    flags = (*ONE_RANK_A_NODE, "--output", f"{folder}/out")
    return submit(cluster, REPO, *recipe, "--run_dir", str(folder / "run"), flags=flags, **variables)


def until_trained(cluster: Cluster, job: int, folder: Path, iteration: int) -> None:
    """Wait until ``iteration`` is logged."""

    def trained() -> bool:
        return (folder / "run/metrics.jsonl").exists() and max(losses(folder / "run"), default=0) >= iteration

    cluster.until(job, trained)


@pytest.mark.slurm
def test_time_limit_and_a_killed_rank_cost_no_loss(
    cluster: Cluster, recipe: tuple[str, ...], tmp_path: Path, uninterrupted: dict[int, tuple[float, float]]
) -> None:
    job = start(cluster, recipe, tmp_path)
    until_trained(cluster, job, tmp_path, 3)
    cluster.run("scancel", "--batch", "--signal=USR2", str(job))
    cluster.until_printed(job, "stopped on request")
    until_trained(cluster, job, tmp_path, 20)
    os.kill(rank_process(cluster, job, 1), signal.SIGKILL)
    ended = cluster.wait(job)
    assert (ended.state, ended.exit_code, ended.restarts) == ("COMPLETED", 0, 2), ended.output
    assert "started again, which is no failure" in ended.output
    assert "there is a new checkpoint: started again" in ended.output
    assert losses(tmp_path / "run") == uninterrupted
    assert (tmp_path / "run/done").read_text() == f"{ITERATIONS}\n"
