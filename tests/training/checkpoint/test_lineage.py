"""Which checkpoint of a run counts among newer ones, copies and strangers; what is kept. No ranks, no torch."""

import os
import shutil
from pathlib import Path

import pytest

from training.checkpoint import folders
from training.checkpoint.committing import FilledFolder, commit
from training.checkpoint.format.manifest import read_manifest
from training.checkpoint.format.pieces import TensorGroup
from training.checkpoint.format.verify import damages, strangers
from training.checkpoint.format.writer import FileWriter
from training.checkpoint.start import find_start
from training.config.checkpoint_config import CheckpointConfig


def save(root: Path, iteration: int, parent: int | None = None, keep: int = 100, loaded: str | None = None) -> Path:
    """As a run saves that continues ``parent``."""
    folder = folders.begin_unfinished(root, iteration, "1a2b")
    with FileWriter(folder, "rank_00000") as file:
        file.add(TensorGroup(("w",), "uint8", (1000,)), (0,), (1000,), [memoryview(bytes([iteration % 256] * 1000))])
    filled = FilledFolder(
        folder=str(folder), writers=("rank_00000",), texts={"state.json": "{}\n"}, about={"iteration": iteration},
        keep=keep, parent=None if parent is None else folders.name_of(parent), loaded=loaded,
    )  # fmt: skip
    path, _ = commit(filled)
    return path


def chain(root: Path, *iterations: int, keep: int = 100) -> None:
    """Saves of one run that is not interrupted."""
    for parent, iteration in zip((None, *iterations), iterations, strict=False):
        save(root, iteration, parent, keep)


def names(root: Path) -> list[str]:
    return [path.name[5:].lstrip("0") for path in folders.complete(root)]


def order(root: Path, load: Path | None = None) -> list[int | None]:
    start = find_start(root, CheckpointConfig(load=None if load is None else str(load)))
    return [folders.iteration_of(path) for path in start.candidates]


def age(path: Path, seconds: float) -> None:
    """``path`` was last written so much earlier, or later."""
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + int(seconds * 1e9)))


def test_a_commit_knows_its_number_and_its_ancestors(tmp_path: Path) -> None:
    chain(tmp_path, 10, 20, 30)
    found = [read_manifest(path) for path in folders.complete(tmp_path)]
    assert [one.lineage.number for one in found] == [1, 2, 3]
    assert found[2].lineage.ancestors == (found[1].hash, found[0].hash)


def test_a_stale_latest_does_not_win_over_its_descendant(tmp_path: Path) -> None:
    chain(tmp_path, 10, 20, 30)
    stale = tmp_path / "latest"
    stale.write_text("iter_0000010\n")
    age(stale, -3600)
    assert order(tmp_path) == [30, 20, 10]
    assert "latest names iter_0000010; iter_0000030 descends from it" in "".join(
        find_start(tmp_path, CheckpointConfig()).notes
    )


def test_a_latest_that_cannot_be_continued_is_not_said_to_have_a_descendant(tmp_path: Path) -> None:
    """A copy under a later iteration's name holds what it is a copy of."""
    chain(tmp_path, 10, 20, 30)
    shutil.copytree(tmp_path / "iter_0000030", tmp_path / "iter_0000040")
    (tmp_path / "latest").write_text("iter_0000040\n")
    start = find_start(tmp_path, CheckpointConfig())
    assert start.candidates[0].name == "iter_0000030"
    said = "\n".join(start.notes)
    assert "descends" not in said and "newer" not in said
    assert "latest names iter_0000040, which holds iteration 30: continuing from iter_0000030" in said


def test_a_newer_checkpoint_that_is_copied_in_wins(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    chain(here, 10, 20)
    shutil.copytree(here, there)
    save(there, 30, 20)
    shutil.copytree(there / "iter_0000030", here / "iter_0000030")
    assert order(here) == [30, 20, 10]
    save(here, 40, 30, keep=2)
    assert names(here) == ["30", "40"]


def test_a_latest_that_was_edited_goes_back(tmp_path: Path) -> None:
    """Megatron's rollback: the number is written into the tracker file by hand."""
    chain(tmp_path, 10, 20, 30)
    (tmp_path / "latest").write_text("iter_0000010\n")
    age(tmp_path / "latest", 1)
    assert order(tmp_path) == [10, 30, 20]
    assert folders.ahead(tmp_path, tmp_path / "iter_0000010") == [tmp_path / "iter_0000020", tmp_path / "iter_0000030"]


def test_a_future_that_was_given_up_stays_until_it_is_passed(tmp_path: Path) -> None:
    chain(tmp_path, 50, 100, 150)
    folders.point_to(tmp_path / "iter_0000050")
    kept = {
        60: ["50", "60", "100", "150"],
        90: ["60", "90", "100", "150"],
        120: ["90", "120", "150"],
        160: ["120", "160"],
    }
    for parent, iteration in ((50, 60), (60, 90), (90, 120), (120, 160)):
        save(tmp_path, iteration, parent, keep=2)
        assert names(tmp_path) == kept[iteration], iteration


def test_the_iteration_of_a_given_up_future_is_replaced_only_by_a_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain(tmp_path, 50, 100)
    folders.point_to(tmp_path / "iter_0000050")
    with monkeypatch.context() as patch:
        patch.setattr(folders, "prune", lambda *_: None)
        save(tmp_path, 100, 50)
    replaced = tmp_path / "iter_0000100.replaced"
    data = tmp_path / "iter_0000100/rank_00000.bin"
    whole = data.read_bytes()
    data.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    folders.prune(tmp_path, 5)
    assert damages(replaced, "hashes") == []
    data.write_bytes(whole)
    folders.prune(tmp_path, 5)
    assert not replaced.exists()
    assert names(tmp_path) == ["50", "100"]


def test_a_checkpoint_that_a_killed_commit_left_without_its_name_gets_it_back(tmp_path: Path) -> None:
    chain(tmp_path, 50, 100)
    (tmp_path / "iter_0000100").rename(tmp_path / "iter_0000100.replaced")
    start = find_start(tmp_path, CheckpointConfig())
    assert [path.name for path in start.candidates] == ["iter_0000100", "iter_0000050"]
    assert "iter_0000100 got its name back" in start.notes[0]


def test_load_goes_back_to_a_checkpoint_of_the_run_once(tmp_path: Path) -> None:
    chain(tmp_path, 10, 20, 30)
    start = find_start(tmp_path, CheckpointConfig(load=str(tmp_path / "iter_0000010")))
    assert start.own
    assert [folders.iteration_of(path) for path in start.candidates] == [10, 30, 20]
    assert start.loaded == read_manifest(tmp_path / "iter_0000010").hash
    save(tmp_path, 15, 10, loaded=start.loaded)
    save(tmp_path, 18, 15)
    again = find_start(tmp_path, CheckpointConfig(load=str(tmp_path / "iter_0000010")))
    assert folders.iteration_of(again.candidates[0]) == 18
    assert "went back to it before" in "".join(again.notes)


def test_a_copy_under_another_name_counts_as_neither(tmp_path: Path) -> None:
    chain(tmp_path, 10, 20)
    shutil.copytree(tmp_path / "iter_0000010", tmp_path / "iter_0000090")
    start = find_start(tmp_path, CheckpointConfig())
    assert [path.name for path in start.candidates] == ["iter_0000020", "iter_0000010"]
    assert "iter_0000090 holds iteration 10" in start.notes[0]
    for parent, iteration in ((20, 30), (30, 100)):
        save(tmp_path, iteration, parent, keep=1)
    assert names(tmp_path) == ["90", "100"]


@pytest.mark.parametrize("name", [".DS_Store", ".nfs0000000012", "state.json~", ".config.toml.swp", "notes.txt"])
def test_files_of_others_are_no_damage(name: str, tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    (path / name).write_bytes(b"x")
    assert damages(path, "hashes") == []
    assert strangers(path) == [name]


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_a_latest_of_the_wrong_kind_is_as_none(make: object, tmp_path: Path) -> None:
    chain(tmp_path, 10, 20)
    (tmp_path / "latest").unlink()
    make(tmp_path / "latest")  # type: ignore[operator]
    assert order(tmp_path) == [20, 10]
