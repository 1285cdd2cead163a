"""A run's folder that nodes do not share is noticed at the start. Two ranks that say they are on two nodes."""

from dataclasses import replace
from pathlib import Path

import pytest

from parallel import groups, launch
from parallel.layout import Layout
from program.errors import SharedFault, SharedMistake
from ranks import run_ranks
from training.checkpoint.format.manifest import MANIFEST
from training.run_dir.shared_check import check_shared


def look(
    identity: launch.Identity, folders: list[Path], expected: str | None, kind: type[Exception] = SharedMistake
) -> None:
    """Check ``folders[rank]`` on every rank, each on a node of its own."""
    with groups.start(Layout(dp=2), identity, device="cpu", seed=1) as ranks:
        apart = replace(ranks, identity=replace(identity, local_rank=0, local_world_size=1))
        if expected is None:
            check_shared(folders[identity.rank], apart, wait_s=0.5)
        else:
            with pytest.raises(kind, match=expected):
                check_shared(folders[identity.rank], apart, wait_s=0.5)


def test_a_folder_that_all_nodes_share_passes_and_stays_empty(tmp_path: Path) -> None:
    run_ranks(2, look, [tmp_path, tmp_path], None)
    assert not list(tmp_path.iterdir())


def test_a_folder_on_each_nodes_own_disk_is_refused_on_all_ranks(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    run_ranks(2, look, folders, "not the same folder on all nodes.* cannot be read on .*--run_dir")
    assert not [*folders[0].iterdir(), *folders[1].iterdir()]


def test_but_once_the_run_has_trained_it_is_a_fault_that_may_pass(tmp_path: Path) -> None:
    checkpoint = tmp_path / "a/checkpoints/iter_0000010"
    checkpoint.mkdir(parents=True)
    (tmp_path / "b").mkdir()
    (checkpoint / MANIFEST).write_text("{}")
    run_ranks(2, look, [tmp_path / "a", tmp_path / "b"], "not the same folder on all nodes", SharedFault)
    run_ranks(2, look, [tmp_path / "c", tmp_path / "b"], "run_dir .*: cannot be written: No such file")
