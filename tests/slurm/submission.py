"""Submit slurm/pretrain.sbatch from a folder of a test's own, with a small program in pretrain_gpt.py's place."""

import sys
from pathlib import Path

from tests.faults.private_cluster import Job, PrivateCluster

REPO = Path(__file__).parents[2]
SCRIPT = REPO / "slurm/pretrain.sbatch"
TWO_BY_TWO = ("--nodes", "2", "--ntasks-per-node", "2")
NO_GPUS = ("--gpus-per-node", "0")


def checkout(folder: Path, program: str, interpreter: str = ".venv/bin/python") -> Path:
    """A folder to submit from: ``program`` as pretrain_gpt.py, this interpreter as ``interpreter``, a recipe."""
    (folder / "pretrain_gpt.py").write_text(program)
    (folder / "recipe.toml").write_text('run_dir = "run"\n')
    python = folder / interpreter
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return folder


def submit(
    cluster: PrivateCluster, folder: Path, *arguments: str, flags: tuple[str, ...] = (), **variables: str
) -> int:
    """Submit the script from ``folder`` on two nodes with two ranks each, without the doctor: the job's id."""
    environ = {"PYTHONPATH": str(REPO), "DOCTOR": "0", **variables}
    return cluster.submit(
        *TWO_BY_TWO, *NO_GPUS, *flags, str(SCRIPT), *(arguments or ("recipe.toml",)), cwd=folder, variables=environ
    )


def run_job(
    cluster: PrivateCluster, folder: Path, *arguments: str, flags: tuple[str, ...] = (), **variables: str
) -> Job:
    """``submit``, and wait for the end."""
    return cluster.wait(submit(cluster, folder, *arguments, flags=flags, **variables))
