"""What a run says of its checkpoints while it trains: scheduled, committed, costly."""

import re
from pathlib import Path

import pytest

import runs
from data.prepared import Prepared
from training.checkpoint import callback, folders
from training.checkpoint.background import saver
from training.checkpoint.callback import SaveCallback
from training.progress import Progress

FLAGS = "--train.train_iters 2 --checkpoint.save_interval 1 --train.eval_interval None --log.report False".split()


def said(capfd: pytest.CaptureFixture[str]) -> list[str]:
    """What was printed of checkpoints, sizes and times left out."""
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith(("checkpoint", "warning"))]
    return [re.sub(r"[\d.]+ (s|MiB)\b", r"N \1", line) for line in lines]


@pytest.mark.campaign
def test_scheduled_and_committed_are_different_lines(
    prepared: Prepared, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runs.train(prepared, runs.configuration(tmp_path, *FLAGS, "--checkpoint.async_save", "True"), 2)
    lines = said(capfd)
    for name in ("iter_0000001", "iter_0000002"):
        scheduled = f"checkpoint {name} scheduled"
        committed = f"checkpoint {name} COMMITTED (N MiB in N s; training stood still for N s)"
        assert lines.index(scheduled) < lines.index(committed)
    assert len(lines) == 4
    runs.train(prepared, runs.configuration(tmp_path / "waiting", *FLAGS), 1)
    printed = "COMMITTED (N MiB in N s; training stood still for N s)"
    assert said(capfd) == [f"checkpoint iter_000000{n} {printed}" for n in (1, 2)]


@pytest.mark.campaign
def test_saving_that_costs_too_much_is_said_once(
    prepared: Prepared, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callback, "SETTLED_S", 0.0)
    for share, warnings in ((1.0, 0), (0.0, 1)):
        monkeypatch.setattr(callback, "COSTLY", share)
        runs.train(prepared, runs.configuration(tmp_path / str(share), *FLAGS), 1)
        found = [line for line in said(capfd) if line.startswith("warning")]
        assert len(found) == warnings
        assert all("% of the time so far; raise checkpoint.save_interval or " in line for line in found)


KEEP = ("--checkpoint.keep", "3")


def killing_the_writer(monkeypatch: pytest.MonkeyPatch, *iterations: int) -> None:
    """SIGKILL for every rank's writer while it has those iterations' checkpoints."""
    save = SaveCallback.__call__

    def and_kill(self: SaveCallback, progress: Progress) -> tuple[Path, float]:
        done = save(self, progress)
        if progress.iteration in iterations and self.writer is not None:
            self.writer._process.kill()
            self.writer._process.wait()
        return done

    monkeypatch.setattr(SaveCallback, "__call__", and_kill)


def test_the_last_checkpoint_is_made_once_more_if_it_failed(
    prepared: Prepared, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    killing_the_writer(monkeypatch, 2, 3)  # that of 3 is itself a second attempt
    each = ("--checkpoint.save_interval", "None", "--checkpoint.keep", "3", "--checkpoint.async_save", "True")
    runs.train(prepared, runs.configuration(tmp_path, *FLAGS, *each, "--train.train_iters", "1"), 2)
    capfd.readouterr()
    each = (*each, "--checkpoint.save_interval", "2", "--train.train_iters", "3")
    runs.train(prepared, runs.configuration(tmp_path, *FLAGS, *each), 2)
    lines = said(capfd)
    assert any(line.startswith("checkpoint iter_0000003 FAILED: the writer process of rank ") for line in lines)
    assert lines[-1].startswith("checkpoint iter_0000003 COMMITTED")
    assert [folder.name for folder in folders.complete(tmp_path / "checkpoints")] == ["iter_0000001", "iter_0000003"]
    assert (tmp_path / "done").exists()


def test_a_run_whose_last_checkpoint_cannot_be_made_is_not_done(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError("the disk is gone")

    killing_the_writer(monkeypatch, 2)
    monkeypatch.setattr(callback, "save", fails)  # the last attempt, which is not the writer's
    config = runs.configuration(tmp_path, *FLAGS, "--checkpoint.async_save", "True")
    code, failure = runs.train_or_fail(prepared, config, 2)
    assert code == 1
    assert failure is not None and "the disk is gone" in failure.text
    assert not (tmp_path / "done").exists()


def test_a_save_that_fails_deletes_no_older_one_where_there_is_room(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killing_the_writer(monkeypatch, 3)
    each = ("--train.train_iters", "4", "--checkpoint.async_save", "True", *KEEP)
    runs.train(prepared, runs.configuration(tmp_path, *FLAGS, *each), 2)
    left = [folders.iteration_of(folder) for folder in folders.complete(tmp_path / "checkpoints")]
    assert left in ([1, 2, 4], [2, 3, 4])  # 4 is the second attempt, unless the writer was faster than the signal


def test_a_damaged_checkpoint_takes_no_good_ones_place(
    prepared: Prepared, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    two = ("--checkpoint.keep", "2", "--checkpoint.async_save", "False")
    runs.train(prepared, runs.configuration(tmp_path, *FLAGS, *two), 1)
    newest = tmp_path / "checkpoints/iter_0000002"
    part = next(newest.glob("*.bin"))
    part.write_bytes(bytes([part.read_bytes()[0] ^ 1]) + part.read_bytes()[1:])
    runs.train(prepared, runs.configuration(tmp_path, *FLAGS, *two, "--train.train_iters", "3",
                                            "--checkpoint.save_interval", "None"), 1)  # fmt: skip
    assert "set aside, and no checkpoint of this run any more: iter_0000002.damaged" in capfd.readouterr().out
    left = [folders.iteration_of(folder) for folder in folders.complete(tmp_path / "checkpoints")]
    assert left == [1, 3]
    assert (tmp_path / "checkpoints/iter_0000002.damaged/manifest.json").is_file()


def test_where_memory_is_short_training_waits_for_its_checkpoints(
    prepared: Prepared, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver.host_memory, "available_bytes", lambda: 0.0)
    runs.train(prepared, runs.configuration(tmp_path, *FLAGS, "--checkpoint.async_save", "True"), 2)
    of_the_start, *lines = said(capfd)
    assert "its ranks are predicted to hold" in of_the_start
    assert lines[0].startswith("warning: copies of 2 ranks' shares in host memory take ")
    assert lines[0].endswith(": training waits for its checkpoints (checkpoint.async_save)")
    assert [line.split()[0] for line in lines] == ["warning:", "checkpoint", "checkpoint"]
    assert sum(" COMMITTED " in line for line in lines) == 2
    assert not any("scheduled" in line for line in lines)
