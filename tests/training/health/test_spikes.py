"""Spikes of the loss: reported, skipped or stopped at, and the same after a resume."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from data.prepared import Prepared
from tests.training.health.injected import Rank, inject, run, tensors
from training.checkpoint import folders
from training.config.small_sections import FaultConfig
from training.health import update_policy
from training.health.update_policy import Spikes
from training.metrics.jsonl import read_jsonl

FLAGS = ("--train.train_iters", "8", "--train.global_batch_size", "2",
          "--checkpoint.save_interval", "6")  # fmt: skip


@pytest.fixture(autouse=True)
def _a_short_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_policy, "SPIKE_WINDOW", 8)


class BadBatch(Rank):
    """The losses of iterations 7 and 8 are ten times what they should be."""

    last = 8

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.module("").register_forward_hook(self.spoil)

    def spoil(self, module: nn.Module, _inputs: object, losses: Tensor) -> Tensor:
        return losses * 10 if module.training and 7 <= self.iteration <= self.last else losses


def jumps(capfd: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capfd.readouterr().out.splitlines() if "sigma" in line]


def test_a_jump_is_told_once(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """By a resumed run too, which knows nothing of the iterations before but what lies in the checkpoint."""
    inject(monkeypatch, BadBatch)
    assert run(prepared, tmp_path, 1, *FLAGS, "--train.exit_interval", "6") == (0, None)
    assert jumps(capfd) == []
    assert run(prepared, tmp_path, 1, *FLAGS) == (0, None)
    [said] = jumps(capfd)
    assert said.startswith("iteration 7: loss ")
    assert "sigma above " in said
    assert " and gradient norm " in said
    assert said.endswith(", its mean of 6")
    state = json.loads((tmp_path / "checkpoints/iter_0000008/state.json").read_text())
    assert len(state["entries"]["watch"]["spikes"]["losses"]) == 8


def test_its_update_is_passed_over(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    inject(monkeypatch, BadBatch)
    assert run(prepared, tmp_path, 2, *FLAGS, "--fault.spike", "skip") == (0, None)
    [said] = jumps(capfd)
    assert "its update is skipped (fault.spike)" in said
    skipped = [line["skipped"] for line in read_jsonl(tmp_path / "metrics.jsonl")]
    assert skipped[:7] == [0] * 6 + [1]
    six, eight = (tmp_path / f"checkpoints/iter_000000{n}/rank_00001.bin" for n in (6, 8))
    if skipped[7]:  # both were skipped: the state is as it was, but for the generators
        assert six.read_bytes()[:100_000] == eight.read_bytes()[:100_000]


@pytest.mark.campaign
def test_or_the_run_stops(prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inject(monkeypatch, BadBatch)
    code, failure = run(prepared, tmp_path, 1, *FLAGS, "--fault.spike", "stop")
    assert code == 1
    assert failure is not None
    assert failure.text.startswith("iteration 7: loss ")
    assert "Stopped before its update (fault.spike)" in failure.text
    newest = folders.latest(tmp_path / "checkpoints")
    assert newest is not None
    assert newest.name == "iter_0000006"


def test_or_the_next_start_passes_over_it(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Exactly: as a run in which nothing jumps, and that leaves that batch out from the start."""
    flags = (*FLAGS, "--fault.spike", "rollback", "--log.log_interval", "1")
    monkeypatch.setattr(BadBatch, "last", 7)
    with monkeypatch.context() as patched:
        inject(patched, BadBatch)
        code, failure = run(prepared, tmp_path / "run", 1, *flags)
        assert code == 1
        assert failure is not None
        assert failure.text.startswith("iteration 7: loss ")
        assert "skips the update of samples 12 to 13 (" in failure.text
        capfd.readouterr()
        assert run(prepared, tmp_path / "run", 1, *flags) == (0, None)
    out = capfd.readouterr().out
    noted = tmp_path / "run/skipped_samples.json"
    assert out.count(f"iteration 7: its update is skipped, as {noted} says") == 1
    assert "sigma" not in out
    assert [line["skipped"] for line in read_jsonl(tmp_path / "run/metrics.jsonl")][-2:] == [1, 0]
    (tmp_path / "other").mkdir()
    (tmp_path / "other/skipped_samples.json").write_bytes(noted.read_bytes())
    assert run(prepared, tmp_path / "other", 1, *flags) == (0, None)
    assert tensors(tmp_path / "run", 8) == tensors(tmp_path / "other", 8)
    state = json.loads((tmp_path / "run/checkpoints/iter_0000008/state.json").read_text())
    assert state["entries"]["watch"]["passed_over"] == [[12, 14]]


def test_what_jumps() -> None:
    spikes = Spikes(window=8, sigma=6.0)
    values = [5.0, 4.9, 5.1, 5.0, 4.8, 5.2]
    assert [spikes.jump(value, 1.0) for value in values] == [None] * 6
    assert spikes.jump(2.0, 1.0) is None  # a fall is none
    assert Spikes(8, 6.0).jump(1e9, 1.0) is None  # nothing is known yet
    resumed = Spikes(8, 6.0)
    resumed.restore(json.loads(json.dumps(spikes.state())))
    for one in (spikes, resumed):
        said = one.jump(5.0, 1.01)
        assert said is not None
        assert said.startswith("gradient norm 1.01 is 10.0 sigma above 1, its mean of 7")
    flat = Spikes(4, 6.0)
    assert [flat.jump(1.0 + 1e-9 * n, 1.0) for n in range(8)] == [None] * 8


def test_what_makes_no_sense_is_refused() -> None:
    assert FaultConfig().problems() == []
    [said] = FaultConfig(replica_check_interval=-1).problems()
    assert said == "fault.replica_check_interval must be 0 or more, found -1."
    assert len(FaultConfig(watch_interval=-1, failures_per_gpu_hour=-1.0).problems()) == 2
