"""The private cluster's faults: a node that dies with all that runs on it, and a link that is cut and mended."""

import os
from pathlib import Path

import pytest

from tools.faults.private_cluster import Cluster, marked, running_cluster, until
from tools.faults.private_links import links_possible

RING = """#!/bin/bash
#SBATCH --nodes=2 --exclusive --requeue --open-mode=append --output=out
srun bash -c 'echo up on $(hostname) $SLURMD_NODENAME; [ $SLURM_RESTART_COUNT ] || sleep 600'
"""


def alive(cluster: Cluster, node: str) -> bool:
    return bool(marked(cluster, f"SLURMD_NODENAME={node}".encode(), b"SLURM_STEP_ID=0"))


@pytest.mark.slurm
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    not (links_possible() or os.environ.get("TRIPLANE_NEEDS_SLURM")),
    reason="network namespaces need root and the kernel's leave",
)
def test_a_job_whose_node_is_cut_off_starts_again_elsewhere_and_a_killed_node_has_nothing_left(tmp_path: Path) -> None:
    assert links_possible(), "a cut link must be tested here, but root and `ip netns add` are needed for it"
    (tmp_path / "ring.sh").write_text(RING)
    with running_cluster(tmp_path / "cluster", nodes=4, cpus_per_node=2, links=True) as cluster:
        cluster.submit("--nodelist=n4", "--output=last", "--wrap", "srun sleep 600", cwd=tmp_path)
        job = cluster.submit("ring.sh", cwd=tmp_path)
        cluster.until(job, lambda: cluster.output(job).count("up on") == 2)
        assert "up on n1 n1" in cluster.output(job), "a host name of its own"
        cluster.link_down("n2")
        ended = cluster.wait(job)
        assert (ended.state, ended.restarts) == ("COMPLETED", 1), ended.output
        assert "up on n3 n3" in ended.output
        assert alive(cluster, "n2"), "cut off, its rank knows nothing of all that"
        cluster.link_up("n2")
        until(lambda: not alive(cluster, "n2"), 60.0)
        assert alive(cluster, "n4")
        cluster.kill_node("n4")
        assert not alive(cluster, "n4")
