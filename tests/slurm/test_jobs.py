"""A row of the campaign ``jobs``, through the code that plays all of them. Nothing is timed here.

The shortest one: that a killed rank costs nothing is shown by test_resume.py, and the other rows by ``make faults``.
"""

from pathlib import Path

import pytest

from tools.faults import jobs
from tools.faults.job_scene import Scene, Undisturbed
from tools.faults.private_cluster import Cluster

SAMPLE = "operator: batch that no layout divides|start"


@pytest.mark.slurm
@pytest.mark.timeout(600)
def test_a_row_is_played(cluster: Cluster, tmp_path: Path, cache_dir: Path) -> None:
    nothing = Undisturbed(digests={}, losses={})
    scene = Scene(cluster=cluster, folder=tmp_path / "row", cache_dir=cache_dir, undisturbed=nothing)
    result = jobs.one(SAMPLE, scene)
    assert result.problem == "", result
    assert "train.global_batch_size 5" in result.facts["printed"]


def test_every_row_has_a_name_and_a_phase() -> None:
    assert len(jobs.cases(1000)) == len(jobs.ROWS) > 30
    assert all(case.count("|") == 1 and case.count(": ") >= 1 for case in jobs.ROWS)
    assert SAMPLE in jobs.ROWS
