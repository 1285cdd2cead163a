"""What a run says of its checkpoints while it trains: scheduled, committed, costly."""

import re
from pathlib import Path

import pytest

import runs
from data.prepare import Prepared
from training import saves

FLAGS = ("--train.train_iters", "4", "--checkpoint.save_interval", "2", "--train.eval_interval", "None")


def said(capfd: pytest.CaptureFixture[str]) -> list[str]:
    """What was printed of checkpoints, sizes and times left out."""
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith(("checkpoint", "warning"))]
    return [re.sub(r"[\d.]+ (s|MiB)\b", r"N \1", line) for line in lines]


def test_scheduled_and_committed_are_different_lines(
    prepared: Prepared, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runs.train(prepared, runs.configuration(tmp_path, *FLAGS, "--checkpoint.async_save", "True"), 2)
    lines = said(capfd)
    for name in ("iter_0000002", "iter_0000004"):
        scheduled = f"checkpoint {name} scheduled"
        committed = f"checkpoint {name} COMMITTED (N MiB in N s; training stood still for N s)"
        assert lines.index(scheduled) < lines.index(committed)
    assert len(lines) == 4
    runs.train(prepared, runs.configuration(tmp_path / "waiting", *FLAGS), 1)
    told = "COMMITTED (N MiB in N s; training stood still for N s)"
    assert said(capfd) == [f"checkpoint iter_000000{n} {told}" for n in (2, 4)]


def test_saving_that_costs_too_much_is_said_once(
    prepared: Prepared, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saves, "SETTLED_S", 0.0)
    for share, warnings in ((1.0, 0), (0.0, 1)):
        monkeypatch.setattr(saves, "COSTLY", share)
        runs.train(prepared, runs.configuration(tmp_path / str(share), *FLAGS), 1)
        found = [line for line in said(capfd) if line.startswith("warning")]
        assert len(found) == warnings
        assert all("% of the time so far; raise checkpoint.save_interval or " in line for line in found)
