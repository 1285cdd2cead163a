"""Tests marked ``slurm`` run on a private cluster; without SLURM's programs they are visibly deselected.

Where they must run (``TRIPLANE_NEEDS_SLURM``, which ``.ci/run`` sets), missing programs are a failure.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import together
from tests.faults.private_cluster import PrivateCluster, missing_programs, running_cluster

MISSING = missing_programs()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not MISSING or os.environ.get("TRIPLANE_NEEDS_SLURM"):
        return
    away = [item for item in items if item.get_closest_marker("slurm")]
    items[:] = [item for item in items if item not in away]
    config.hook.pytest_deselected(items=away)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if MISSING:
        terminalreporter.write_line(
            f"Tests marked slurm were deselected: not installed: {', '.join(MISSING)} "
            "(Debian: apt-get install --no-install-recommends slurm-wlm munge slurm-wlm-basic-plugins)."
        )


@pytest.fixture
def cluster(shared_cluster: PrivateCluster) -> Iterator[PrivateCluster]:
    """The private cluster: what a test that failed leaves running shall not stand in the next one's way."""
    yield shared_cluster
    if jobs := shared_cluster.run("squeue", "--noheader", "--format=%i").stdout.split():
        shared_cluster.run("scancel", *jobs)


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateCluster]:
    """Eight nodes with 4 CPUs and 2 stand-ins for GPUs each."""
    assert not MISSING, f"SLURM must be tested here, but there is no {', '.join(MISSING)}"
    with running_cluster(tmp_path_factory.mktemp("slurm"), nodes=8, cpus_per_node=4, gpus_per_node=2) as running:
        yield running


@pytest.fixture(scope="module")
def played(
    request: pytest.FixtureRequest, shared_cluster: PrivateCluster, tmp_path_factory: pytest.TempPathFactory
) -> together.Played:
    """A module's ``scenario_…(cluster, tmp_path)``: four have the eight nodes, while others wait for SLURM."""

    def run(name: str, scenario: Callable[[PrivateCluster, Path], None]) -> None:
        folder = tmp_path_factory.mktemp(name)
        try:
            scenario(shared_cluster, folder)
        finally:
            for line in shared_cluster.run("squeue", "--noheader", "--format=%i %Z").stdout.splitlines():
                if line.partition(" ")[2] == str(folder):
                    shared_cluster.run("scancel", line.partition(" ")[0])

    return together.play(request, 6, run)
