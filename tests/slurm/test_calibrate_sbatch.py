"""slurm/calibrate.sbatch: two nodes become a cluster file, on a real SLURM; its refusals without one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.private_cluster import PrivateCluster
from tests.slurm.submission import NO_GPUS
from tools import clusters

REPO = Path(__file__).parents[2]
SCRIPT = REPO / "slurm/calibrate.sbatch"


@pytest.mark.campaign
@pytest.mark.slurm
def test_two_nodes_become_a_cluster(cluster: PrivateCluster, tmp_path: Path) -> None:
    """One rank each; several on a node are measured in tests/tools/plan/test_calibrate.py."""
    path = tmp_path / "mine.toml"
    around = {"REPO": str(REPO), "PYTHON": sys.executable}
    job = cluster.wait(
        cluster.submit("--ntasks-per-node", "1", *NO_GPUS, str(SCRIPT), str(path), cwd=tmp_path, variables=around),
        timeout_s=500,
    )
    assert job.exit_code == 0, job.output
    measured = clusters.load(str(path))
    assert (measured.measured["ranks"], measured.measured["nodes"], measured.node.gpus_per_node) == (2, 2, 1)
    assert {each["over"] for each in measured.measured["collectives"]} == {"nodes", "one link"}
    assert "send and receive" in job.output, "the table"
    assert "Warning" not in job.output, "what Megatron says when it is imported"


@pytest.mark.parametrize(
    "arguments, variables, words",
    [
        ((), {}, "usage: sbatch"),
        (("there.toml",), {}, "there.toml exists already"),
        (("new.toml",), {"CLUSTER_ENV": "nowhere.env"}, "CLUSTER_ENV names nowhere.env"),
        (("new.toml",), {"CLUSTER": "h100"}, "cluster h100: unknown"),
    ],
)
def test_mistake_ends_the_job_before_anything_starts(
    tmp_path: Path, arguments: tuple[str, ...], variables: dict[str, str], words: str
) -> None:
    """The batch shell itself, without SLURM: no command of SLURM's is reached."""
    (tmp_path / "there.toml").touch()
    own = {"PYTHONPATH": str(REPO), "SLURM_SUBMIT_DIR": str(tmp_path), "PYTHON": sys.executable, **variables}
    done = subprocess.run(["bash", SCRIPT, *arguments], env=os.environ | own, capture_output=True, text=True)
    assert done.returncode == 2 and words in done.stderr, done.stderr
