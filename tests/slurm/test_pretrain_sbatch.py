"""slurm/pretrain.sbatch on a real SLURM: two nodes on this host, two ranks each."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, Job
from training.metrics.jsonl import read_jsonl

REPO = Path(__file__).parents[2]
SCRIPT = REPO / "slurm/pretrain.sbatch"
TWO_BY_TWO = ("--nodes", "2", "--ntasks-per-node", "2")
NO_GPUS = ("--gpus-per-node", "0")

ALL_REDUCE = """
import json, os, sys
from pathlib import Path
import torch
from parallel import launch
identity = launch.detect(os.environ)
launch.set_rendezvous(os.environ, identity)
torch.distributed.init_process_group("gloo")
ranks = torch.tensor(identity.rank)
torch.distributed.all_reduce(ranks)
torch.distributed.destroy_process_group()
seen = {
    "rank": identity.rank, "world_size": identity.world_size, "launcher": identity.launcher,
    "local_rank": identity.local_rank, "local_world_size": identity.local_world_size,
    "node": os.environ["SLURMD_NODENAME"], "sum": int(ranks), "arguments": sys.argv[1:], "cwd": os.getcwd(),
    "cpus": os.environ["SRUN_CPUS_PER_TASK"], "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
    "master": os.environ["MASTER_ADDR"], "safe_path": "PYTHONSAFEPATH" in os.environ,
}
Path(f"rank-{identity.rank}.json").write_text(json.dumps(seen))
"""
"""Stands in for pretrain_gpt.py: finds its rank as that does, reduces once, and notes what it saw."""


def checkout(folder: Path, program: str, interpreter: str = ".venv/bin/python") -> Path:
    """A folder to submit from: ``program`` as pretrain_gpt.py, this interpreter as ``interpreter``."""
    (folder / "pretrain_gpt.py").write_text(program)
    python = folder / interpreter
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return folder


def run_job(cluster: Cluster, folder: Path, *arguments: str, flags: tuple[str, ...] = (), **variables: str) -> Job:
    """Submit the script from ``folder`` on two nodes with two ranks each, and wait for its end."""
    environ = {"PYTHONPATH": str(REPO), **variables}
    return cluster.wait(
        cluster.submit(*TWO_BY_TWO, *NO_GPUS, *flags, str(SCRIPT), *arguments, cwd=folder, variables=environ)
    )


def test_script_is_valid_bash() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)


def test_missing_recipe_is_a_usage_error() -> None:
    done = subprocess.run(["bash", str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "usage: sbatch" in done.stderr


@pytest.mark.slurm
def test_sbatch_accepts_the_script(cluster: Cluster) -> None:
    for gpus in ("0", "2"):
        done = cluster.run("sbatch", "--test-only", *TWO_BY_TWO, "--gpus-per-node", gpus, str(SCRIPT), "recipe.toml")
        assert done.returncode == 0 and "to start at" in done.stdout, done.stdout


@pytest.mark.slurm
def test_sbatch_asks_for_eight_gpus_a_node_by_default(cluster: Cluster) -> None:
    done = cluster.run("sbatch", "--test-only", *TWO_BY_TWO, str(SCRIPT), "recipe.toml")
    assert done.returncode != 0, "these nodes have 2 GPUs each"


@pytest.mark.slurm
def test_ranks_meet_and_each_knows_its_place(cluster: Cluster, tmp_path: Path) -> None:
    folder = checkout(tmp_path, ALL_REDUCE)
    arguments = ("recipe.toml", "--data.paths", "a b")
    job = run_job(cluster, folder, *arguments, flags=("--gpus-per-node", "2"), PYTHONSAFEPATH="1")
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.output
    seen = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(4)]
    assert [(rank["rank"], rank["node"], rank["local_rank"]) for rank in seen] == [
        (0, "n1", 0), (1, "n1", 1), (2, "n2", 0), (3, "n2", 1),
    ]  # fmt: skip
    for rank in seen:
        assert (rank["launcher"], rank["world_size"], rank["local_world_size"]) == ("srun", 4, 2)
        assert rank["sum"] == 0 + 1 + 2 + 3
        assert rank["arguments"] == list(arguments) and rank["cwd"] == str(folder)
        assert rank["cpus"] == "2", "half of a node's 4 CPUs"
        assert rank["gpus"] == "0,1", "every rank sees its node's GPUs"
        assert rank["master"] == "127.0.0.1", "an address; the names n1 and n2 do not resolve"
        assert not rank["safe_path"]


@pytest.mark.slurm
def test_exit_code_is_that_of_the_ranks(cluster: Cluster, tmp_path: Path) -> None:
    job = run_job(cluster, checkout(tmp_path, "raise SystemExit(75)"), "recipe.toml")
    assert (job.state, job.exit_code) == ("FAILED", 75), job.output


@pytest.mark.slurm
def test_failing_rank_ends_the_others(cluster: Cluster, tmp_path: Path) -> None:
    program = "import os, time\nif os.environ['SLURM_PROCID'] == '3': raise SystemExit(1)\ntime.sleep(600)"
    job = run_job(cluster, checkout(tmp_path, program), "recipe.toml")
    assert job.state == "FAILED" and job.exit_code != 0, job.output


@pytest.mark.slurm
def test_python_comes_from_the_path_without_a_venv_and_settings_from_the_cluster_file(
    cluster: Cluster, tmp_path: Path
) -> None:
    folder = checkout(tmp_path, "import os\nprint('fabric', os.environ['NCCL_IB_HCA'])", interpreter="bin/python")
    (folder / "slurm").mkdir()
    (folder / "slurm/cluster.env").write_text(f'export NCCL_IB_HCA=mlx5 PATH="{folder}/bin:$PATH"\n')
    job = run_job(cluster, folder, "recipe.toml")
    assert job.state == "COMPLETED" and job.output.count("fabric mlx5\n") == 4, job.output


@pytest.mark.slurm
def test_missing_cluster_file_that_was_named_is_an_error(cluster: Cluster, tmp_path: Path) -> None:
    job = run_job(cluster, checkout(tmp_path, "print('ran')"), "recipe.toml", CLUSTER_ENV="nowhere.env")
    assert job.exit_code == 2 and "CLUSTER_ENV names nowhere.env" in job.output and "ran" not in job.output


@pytest.mark.slurm
def test_losses_are_those_of_the_same_job_run_locally(cluster: Cluster, tmp_path: Path, cache_dir: Path) -> None:
    flags = [
        "slurm/recipes/debug.toml", "--device", "cpu", "--data.cache_dir", str(cache_dir),
        "--parallel.pipeline_model_parallel_size", "2", "--train.train_iters", "4",
    ]  # fmt: skip
    job = run_job(
        cluster,
        REPO,
        *flags,
        "--run_dir",
        str(tmp_path / "srun"),
        flags=("--output", f"{tmp_path}/out", "--ntasks-per-node", "1"),
    )
    assert job.state == "COMPLETED", job.output
    local = [sys.executable, "pretrain_gpt.py", *flags, "--nproc", "2", "--run_dir", str(tmp_path / "local")]
    done = subprocess.run(local, cwd=REPO, env=cluster.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "srun") == losses(tmp_path / "local")
    assert len(losses(tmp_path / "local")) == 4


def losses(run_dir: Path) -> list[tuple[float, float]]:
    """Iteration and loss of every logged iteration."""
    return [(line["iteration"], line["loss"]) for line in read_jsonl(run_dir / "metrics.jsonl") if "loss" in line]
