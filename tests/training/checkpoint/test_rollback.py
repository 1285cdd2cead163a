"""Whole runs that go back to an earlier checkpoint, or find that ``latest`` is stale."""

import os
from pathlib import Path

import pytest

from campaign import param
from data.prepared import Prepared
from runs import configuration, train
from training.checkpoint import folders
from training.checkpoint.format.manifest import read_manifest

SAVES = "--checkpoint.save_interval 1 --checkpoint.keep 9 --log.log_interval 1 --log.report False".split()


def until(run_dir: Path, iteration: int, prepared: Prepared, *flags: str) -> str:
    """Train on to ``iteration``: what was said from the start on."""
    read, write = os.pipe()
    saved = os.dup(1)
    os.dup2(write, 1)
    try:
        train(prepared, configuration(run_dir, *SAVES, "--train.exit_interval", str(iteration), *flags), 1)
    finally:
        os.dup2(saved, 1)
        os.close(write)
    return os.read(read, 1 << 16).decode()


def names(run_dir: Path) -> list[int | None]:
    return [folders.iteration_of(path) for path in folders.complete(run_dir / "checkpoints")]


@pytest.mark.parametrize("how", ["latest", param("load")])
def test_going_back_keeps_what_was_ahead_until_it_is_passed(how: str, prepared: Prepared, tmp_path: Path) -> None:
    root = tmp_path / "run/checkpoints"
    until(tmp_path / "run", 3, prepared)
    before = read_manifest(root / "iter_0000003").hash
    flags = ("--checkpoint.load", str(root / "iter_0000001")) if how == "load" else ()
    if how == "latest":
        (root / "latest").write_text("iter_0000001\n")
    said = until(tmp_path / "run", 2, prepared, *flags)
    assert "newer checkpoints are not resumed from" in said
    assert "iter_0000002, iter_0000003" in said
    assert names(tmp_path / "run") == [1, 2, 3]
    assert read_manifest(root / "iter_0000003").hash == before
    assert read_manifest(root / "iter_0000002").lineage.ancestors[0] == read_manifest(root / "iter_0000001").hash
    until(tmp_path / "run", 3, prepared, *flags)  # the same command goes on, and does not go back again
    assert read_manifest(root / "iter_0000003").hash != before
    assert names(tmp_path / "run") == [1, 2, 3]
    assert not list(root.glob("*.replaced*"))


def test_a_stale_latest_loses_no_work(prepared: Prepared, tmp_path: Path) -> None:
    root = tmp_path / "run/checkpoints"
    until(tmp_path / "run", 3, prepared)
    (root / "latest").write_text("iter_0000001\n")
    os.utime(root / "latest", (1, 1))
    said = until(tmp_path / "run", 4, prepared)
    assert "latest names iter_0000001; iter_0000003 descends from it and is newer" in said
    assert "at           iteration 3" in said
    assert names(tmp_path / "run") == [1, 2, 3, 4]
