"""Which folder a start has, and what is kept of earlier ones."""

import os
from pathlib import Path

import pytest

from parallel.launch import Identity
from training.watchdog import starts, verdict_file
from training.watchdog.verdict import Verdict

SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2", "SLURM_RESTART_COUNT": "0"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
WORD = Verdict(kind="hang", rank=0, world_size=2, host="n1", iteration=1, phase="step", line="a word")


@pytest.mark.parametrize(
    ("launcher", "environ", "other"),
    [
        ("srun", SRUN, {"SLURM_RESTART_COUNT": "1"}),
        ("srun", SRUN, {"SLURM_STEP_ID": "3"}),
        ("srun", SRUN, {"SLURM_JOB_ID": "8"}),
        ("torchrun", TORCHRUN, {"MASTER_PORT": "29501"}),
        ("torchrun", TORCHRUN, {"MASTER_ADDR": "10.0.0.2"}),
    ],
)
def test_all_ranks_of_a_start_have_one_folder_and_other_starts_another(
    launcher: str, environ: dict[str, str], other: dict[str, str], tmp_path: Path
) -> None:
    ranks = [Identity(rank=rank, world_size=2, launcher=launcher) for rank in (0, 1)]  # type: ignore[arg-type]
    mine = {starts.folder_of(tmp_path, rank, environ, None) for rank in ranks}
    theirs = {starts.folder_of(tmp_path, rank, environ | other, None) for rank in ranks}
    assert (len(mine), len(mine | theirs)) == (1, 2)


def test_jobs_that_meet_at_their_own_localhost_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank, environ = Identity(launcher="torchrun"), TORCHRUN | {"MASTER_ADDR": "localhost"}
    here = starts.folder_of(tmp_path, rank, environ | {"SLURMD_NODENAME": "n1"}, None)
    assert here == starts.folder_of(tmp_path, rank, environ | {"SLURMD_NODENAME": "n2"}, None)
    monkeypatch.setattr(starts, "machine", lambda: "another one")
    assert here != starts.folder_of(tmp_path, rank, environ, None)


def test_a_start_that_torchrun_names_alike_begins_where_the_last_one_has_its_verdict(tmp_path: Path) -> None:
    rank, environ = Identity(launcher="torchrun"), TORCHRUN
    folders = []
    for _ in range(3):
        folders.append(starts.folder_of(tmp_path, rank, environ, None))
        starts.begin_start(folders[-1])
        assert starts.folder_of(tmp_path, rank, environ, None) == folders[-1]
        verdict_file.leave(folders[-1], WORD)
    assert len({*folders}) == 3


def test_evidence_of_the_last_starts_is_kept_and_words_of_nodes_are_not(tmp_path: Path) -> None:
    folders = [starts.folder_of(tmp_path, None, {}, f"{number:02d}") for number in range(starts.KEPT + 5)]
    for age, folder in enumerate(reversed(folders)):
        folder.mkdir(parents=True)
        (folder / "stacks-n1.txt").write_text("text")
        os.utime(folder, (1e9 - age, 1e9 - age))
    (tmp_path / "watch/nonfinite-iter_0000003").mkdir()
    (folders[-1] / "node-n1.json").write_text("{}")
    starts.begin_start(folders[-1])
    assert sorted((tmp_path / "watch").iterdir()) == [tmp_path / "watch/nonfinite-iter_0000003", *folders[5:]]
    assert [path.name for path in folders[-1].iterdir()] == ["stacks-n1.txt"]


def test_the_newest_verdict_is_found(tmp_path: Path) -> None:
    assert verdict_file.newest(tmp_path) is None
    for number in range(3):
        verdict_file.leave(starts.folder_of(tmp_path, None, {}, f"{number}"), WORD)
        os.utime(tmp_path / f"watch/start-{number}/verdict.json", (1e9 + number % 2, 1e9 + number % 2))
    assert verdict_file.newest(tmp_path) == tmp_path / "watch/start-1/verdict.json"
