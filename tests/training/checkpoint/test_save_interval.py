"""How often to save: the formula, and what a run says about it."""

import math
from pathlib import Path

import pytest

import runs
from data.prepared import Prepared
from training.checkpoint import save_interval
from training.checkpoint.save_interval import SaveInterval
from training.checkpoint.young_daly import SHORTEST_S, advice, advised_interval_s, mtbf_s
from training.config.small_sections import FAILURES_PER_GPU_HOUR, FaultConfig
from training.progress import Progress


def test_the_published_rate_is_its_own_arithmetic() -> None:
    assert pytest.approx(419 / (54 * 24 * 16384), rel=0.02) == FAILURES_PER_GPU_HOUR
    assert mtbf_s(16384, FAILURES_PER_GPU_HOUR) == pytest.approx(54 * 86400 / 419, rel=0.02)
    assert math.isinf(mtbf_s(8, 0.0))


def test_young_and_daly() -> None:
    assert advised_interval_s(30.0, 28_440.0) == pytest.approx(math.sqrt(2 * 30 * 28_440), rel=0.02)
    assert advised_interval_s(300.0, 3600.0) == pytest.approx(1276.5, abs=0.1)  # by hand
    assert advised_interval_s(300.0, 100.0) == 100.0
    assert advised_interval_s(0.0, 3600.0) == SHORTEST_S
    assert math.isinf(advised_interval_s(1.0, math.inf))


def test_advice_counts_in_iterations_and_only_where_it_matters() -> None:
    text = advice(3600.0, 1200, 5.0, 3 * 3600.0, 0.01)
    assert text is not None
    assert "every 5.42 minutes (checkpoint.save_interval = 108) would lose 3.0% of the time" in text
    assert "every 60 minutes loses 15.9%" in text
    assert advice(400.0, 133, 5.0, 3 * 3600.0, 0.01) is None
    assert advice(3600.0, 1200, 5.0, math.inf, 0.01) is None


def printed(fault: FaultConfig, saves_s: list[float], stall_s: float) -> list[str]:
    """What a run on 16,384 GPUs hears that saved at these times, every 100 iterations."""
    now, said, total = [0.0], list[str](), [0.0]
    watch = SaveInterval(fault, 16384, lambda: total[0], said.append, clock=lambda: now[0])
    for count, now_s in enumerate(saves_s, start=1):
        now[0], total[0] = now_s, total[0] + stall_s
        watch.after_save(Progress(iteration=100 * count), Path("x"), stall_s)
    return said


def test_a_run_is_told_once_and_not_at_once() -> None:
    assert printed(FaultConfig(), [3600.0], 5.0) == []
    found = printed(FaultConfig(), [3600.0, 7200.0, 10800.0], 5.0)
    assert len(found) == 1
    assert "checkpoint.save_interval = 9)" in found[0]
    assert printed(FaultConfig(), [100.0, 101.0], 0.5) == []  # somebody tries things out
    assert len(printed(FaultConfig(), [500.0 + 10 * count for count in range(20)], 5.0)) == 1  # too often
    assert printed(FaultConfig(), [330.0 * count for count in range(1, 9)], 5.0) == []
    assert printed(FaultConfig(failures_per_gpu_hour=0.0), [3600.0, 7200.0], 5.0) == []


def test_a_real_run_says_so(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(save_interval, "SETTLED_S", 0.0)
    flags = "--checkpoint.save_interval 1 --train.train_iters 3 --fault.failures_per_gpu_hour 1e-3".split()
    runs.train(prepared, runs.configuration(tmp_path / "run", *flags), 1)
    log = capfd.readouterr().out
    assert log.count("advice: a checkpoint every") == 1
    assert "a failure is expected every 1e+03 hours" in log


def test_a_negative_rate_is_refused() -> None:
    assert FaultConfig(failures_per_gpu_hour=-1.0).problems() == [
        "fault.failures_per_gpu_hour must be 0 or more, found -1.0."
    ]
