"""A disk that is full, out of inodes, read-only or gone, under ranks that train: a few cases of docs/faults.md.

They mount file systems, which only root can, in a namespace of their own. Elsewhere they fail rather than pass unseen:
deselect them there with ``-k "not test_disk"``.
"""

from pathlib import Path

import pytest

import ranks  # noqa: F401  (imports torch and megatron once: ranks are forked from this process)
from campaign import some
from tests.faults import disk
from tests.faults.results import Store
from training.checkpoint import room

SAMPLE = (
    "full before the first step, while training waits",
    "full in the middle of a save, in the background",
    "full of older checkpoints, while training waits",
    "full before the first checkpoint, in the background",
    "no inodes left, while training waits",
    "read-only between two saves, in the background",
    "folder deleted in the middle of a save, in the background",
    "folder moved away between two saves, in the background",
)


@pytest.mark.parametrize("case", some(SAMPLE, (SAMPLE[0], SAMPLE[1], SAMPLE[2], SAMPLE[5], SAMPLE[7])))
def test_what_a_failing_disk_does_to_a_run(case: str, tmp_path: Path) -> None:
    assert case in disk.cases(1000)
    store = Store(path=tmp_path / "results.jsonl", seed=0, commit="", date="")
    disk.run([case], store, tmp_path, lambda: None)
    [result] = store.results(disk.CAMPAIGN)
    assert result.problem == ""


def test_an_error_of_the_disk_tells_where_and_how_much(tmp_path: Path) -> None:
    needed = r"No space left on device \(it takes 1,234 bytes; free there: [\d,]+ bytes, [\d,]+ files\)"
    with pytest.raises(OSError, match=needed) as caught, room.explain_full_disk(tmp_path / "not/there/yet.bin", 1234):
        raise OSError(28, "No space left on device")
    assert str(tmp_path / "not/there/yet.bin") in str(caught.value)
    with pytest.raises(FileNotFoundError, match=r"gone\.bin"), room.explain_full_disk(tmp_path, 0):
        (tmp_path / "gone.bin").read_bytes()
