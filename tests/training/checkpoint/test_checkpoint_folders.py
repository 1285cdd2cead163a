"""Which checkpoint counts, what is deleted, and what is said where there is none. No ranks, no torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from parallel.layout import Layout
from program.errors import UserError
from training.checkpoint import folders
from training.checkpoint.format.manifest import MANIFEST, DamagedError
from training.checkpoint.state import State, read_state, write_state
from training.progress import Progress


def commit(folder: Path, keep: int, retain_interval: int | None = None) -> None:
    """As training.checkpoint.committing does, but for the files."""
    (folder / MANIFEST).write_text("{}")
    path = folders.give_name(folder)
    folders.point_to(path)
    folders.prune(path.parent, keep, retain_interval)


def make(root: Path, *iterations: int, keep: int = 100) -> None:
    """Checkpoints as far as their names tell, saved one after the other."""
    for iteration in iterations:
        folder = folders.begin_unfinished(root, iteration, "1a2b")
        commit(folder, keep)


def names(root: Path) -> list[str]:
    """But for the file that only Megatron's scripts read."""
    return sorted(path.name for path in root.iterdir() if path.name != folders.LATEST_OF_MEGATRON)


def test_names() -> None:
    assert folders.name_of(100) == "iter_0000100"
    assert folders.name_of(123456789) == "iter_123456789"
    assert folders.iteration_of(Path("x/iter_0000100")) == 100
    assert folders.iteration_of(Path("x/iter_0000100.tmp-1a2b")) is None


def test_latest_is_what_the_file_names(tmp_path: Path) -> None:
    assert folders.latest(tmp_path / "nothing") is None
    assert folders.latest(tmp_path) is None
    make(tmp_path, 1, 2, 10000000)
    assert folders.latest(tmp_path) == tmp_path / "iter_10000000"
    (tmp_path / "latest").write_text("iter_0000001")  # gone back on purpose
    assert folders.latest(tmp_path) == tmp_path / "iter_0000001"


@pytest.mark.parametrize(
    "garbage", [None, b"", b"\xff\xfe\x00", b"iter_0000009", b"../iter_0000002", b"x\n" * 9999, b"."]
)
def test_a_garbage_latest_falls_back_to_the_newest(garbage: bytes | None, tmp_path: Path) -> None:
    make(tmp_path, 1, 2, 3)
    (tmp_path / "iter_0000003" / MANIFEST).unlink()
    (tmp_path / "iter_0000009.tmp-1a2b").mkdir()
    (tmp_path / "iter_0000009.tmp-1a2b" / MANIFEST).touch()
    if garbage is None:
        (tmp_path / "latest").unlink()
    else:
        (tmp_path / "latest").write_bytes(garbage)
    assert folders.latest(tmp_path) == tmp_path / "iter_0000002"


def test_keep_prunes_the_oldest_but_never_the_latest(tmp_path: Path) -> None:
    make(tmp_path, 1, 2, 3, 4, 5)
    folders.prune(tmp_path, 3)
    assert names(tmp_path) == ["iter_0000003", "iter_0000004", "iter_0000005", "latest"]
    folders.point_to(tmp_path / "iter_0000004")
    folders.prune(tmp_path, 1)
    assert names(tmp_path) == ["iter_0000004", "iter_0000005", "latest"]


def test_checkpoints_to_keep_for_good_do_not_count(tmp_path: Path) -> None:
    for iteration in range(1, 8):
        folder = folders.begin_unfinished(tmp_path, iteration, "1a2b")
        commit(folder, keep=2, retain_interval=3)
    assert [folders.iteration_of(path) for path in folders.complete(tmp_path)] == [3, 6, 7]


def test_the_number_is_where_megatron_s_scripts_look(tmp_path: Path) -> None:
    make(tmp_path, 100, 200)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "200\n"


def test_the_order_in_which_checkpoints_are_tried(tmp_path: Path) -> None:
    make(tmp_path, 1, 2, 3, 4)
    folders.point_to(tmp_path / "iter_0000002")
    assert [folders.iteration_of(path) for path in folders.candidates(tmp_path)] == [2, 1, 4, 3]
    assert folders.candidates(tmp_path / "nothing") == []


def test_find_takes_a_checkpoint_its_parent_or_a_run(tmp_path: Path) -> None:
    make(tmp_path / "checkpoints", 1, 2)
    newest = tmp_path / "checkpoints/iter_0000002"
    older = tmp_path / "checkpoints/iter_0000001"
    assert folders.find(str(tmp_path)) == folders.find(str(tmp_path / "checkpoints")) == [newest, older]
    assert folders.find(str(newest)) == [newest]
    assert folders.find(str(older)) == [older]


def test_find_says_what_is_there_instead(tmp_path: Path) -> None:
    make(tmp_path / "checkpoints", 1)
    (tmp_path / "checkpoints/iter_0000001" / MANIFEST).rename(tmp_path / "checkpoints/iter_0000001/state.json")
    (tmp_path / "empty").mkdir()
    for path, found in [
        ("none", "nothing there"),
        ("empty", "an empty folder"),
        ("checkpoints", "a folder with iter_0000001, latest, latest_checkpointed_iteration.txt"),
        ("checkpoints/latest", "a file"),
        ("checkpoints/iter_0000001", "an incomplete checkpoint, with state.json"),
    ]:
        with pytest.raises(UserError) as caught:
            folders.find(str(tmp_path / path))
        assert f"checkpoint.load {tmp_path / path}: expected" in str(caught.value)
        assert f"found {found}." in str(caught.value)


def test_state_comes_back_with_every_bit(tmp_path: Path) -> None:
    state = State(
        progress=Progress(iteration=3, consumed_samples=24),
        layout=Layout(tp=2, dp=4),
        device="cpu",
        optimizer={"step": 3, "grad_scaler": {"scale": 0.1 + 0.2}},
        entries={"schedule": "cosine", "data": [1, None, {"seed": 7}]},
    )
    write_state(tmp_path, state)
    assert read_state(tmp_path) == state


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 1}', '{"format": 1, "progress": {"no": 1}}'])
def test_a_broken_state_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(DamagedError, match=r"state\.json: (not JSON|expected an object|\w+ is missing)"):
        read_state(tmp_path)


def test_a_later_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"format": 2}')
    with pytest.raises(UserError, match="has format 2"):
        read_state(tmp_path)


def test_folders_progress_and_state_need_no_torch() -> None:
    code = (
        "import sys; from training.checkpoint import folders, state; import training.progress; "
        "import training.checkpoint.format.verify; print(sorted({'torch', 'megatron'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
