"""A row of the campaign ``jobs``, through the code that plays all of them. Nothing is timed here."""

from pathlib import Path

import pytest

from tools.faults import jobs
from tools.faults.job_scene import Scene
from tools.faults.private_cluster import Cluster

SAMPLE = ("transient: kill -9 of rank 1|save of 8",)


@pytest.mark.slurm
@pytest.mark.timeout(600)
def test_a_job_survives(cluster: Cluster, tmp_path: Path, cache_dir: Path) -> None:
    undisturbed = jobs.alone(cluster, tmp_path, cache_dir)
    for number, case in enumerate(SAMPLE):
        folder = tmp_path / str(number)
        scene = Scene(cluster=cluster, folder=folder, cache_dir=cache_dir, undisturbed=undisturbed)
        seen = jobs.play(case, scene)
        assert seen.weights == "equal" and seen.printed, seen


def test_every_row_has_a_name_and_a_phase() -> None:
    assert len(jobs.cases(1000)) == len(jobs.ROWS) > 30
    assert all(case.count("|") == 1 and case.count(": ") >= 1 for case in jobs.ROWS)
    assert set(SAMPLE) <= set(jobs.ROWS)
