"""A row of the campaign ``jobs``, through the code that plays all of them: a real run under a real SLURM, killed.

All rows are played by ``make faults``; this one is a campaign of the suite's, too. What is within it, each run of the
suite tries by itself: jobs that start again under SLURM (test_requeue.py), real ranks there (test_calibrate_sbatch.py),
and a killed run that ends with the same bits (tests/training/checkpoint/test_kills.py).
"""

from pathlib import Path

import pytest

import runs
from data.prepared import Prepared
from tests.faults import jobs
from tests.faults.job_scene import FLAGS, ITERATIONS, Scene, Undisturbed, digests
from tests.faults.private_cluster import PrivateCluster
from training.checkpoint import folders

SAMPLE = "transient: kill -9 of rank 1|step 6"


@pytest.mark.slurm
@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_a_killed_rank_costs_nothing(
    cluster: PrivateCluster, tmp_path: Path, cache_dir: Path, prepared: Prepared
) -> None:
    runs.train(prepared, runs.configuration(tmp_path / "undisturbed", *FLAGS, "--train.micro_batch_size", "1"), 2)
    newest = folders.latest(tmp_path / "undisturbed/checkpoints")
    assert newest is not None and folders.iteration_of(newest) == ITERATIONS
    undisturbed = Undisturbed(digests=digests(newest), losses={})
    scene = Scene(cluster=cluster, folder=tmp_path / "row", cache_dir=cache_dir, undisturbed=undisturbed)
    seen = jobs.play(SAMPLE, scene)
    assert seen.weights == "equal" and seen.lost is not None
    assert "rank 1 of 2 on " in seen.printed


def test_every_row_has_a_name_and_a_phase() -> None:
    assert len(jobs.cases(1000)) == len(jobs.ROWS) > 30
    assert all(case.count("|") == 1 and case.count(": ") >= 1 for case in jobs.ROWS)
    assert SAMPLE in jobs.ROWS
