"""Memory that grows on one rank is named with its rate; what settles, or jumps, is not."""

from pathlib import Path

import pytest

from data.prepared import Prepared
from tests.training.health.injected import Rank, inject, run
from training.health import memory_growth
from training.health.memory_growth import Series
from training.progress import Progress
from training.step import StepResult

FLAGS = ("--train.train_iters", "14", "--fault.watch_interval", "1",
         "--checkpoint.save_interval", "14", "--train.global_batch_size", "3")  # fmt: skip


class Leaks(Rank):
    """Rank 1 keeps 24 MiB of every iteration, rank 2 keeps 18 MiB: many times what an allocator's pools add."""

    def after_step(self, progress: Progress, result: StepResult) -> None:
        mib = (0, 24, 18)[self.ranks.rank]
        self.kept = [*getattr(self, "kept", []), bytearray(b"x") * (mib * 2**20)]


def test_a_leak_is_named_once(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    inject(monkeypatch, Leaks)
    monkeypatch.setattr(memory_growth, "GROWTH_MIB", 40.0)
    assert run(prepared, tmp_path, 3, *FLAGS) == (0, None)
    [said] = [line for line in capfd.readouterr().out.splitlines() if "grows" in line]
    assert said.startswith("memory of rank 1 (")
    assert ") and of 1 other, slower, grows steadily, " in said
    rate = float(said.partition("by ")[2].partition(" MiB")[0].replace(",", ""))
    assert 22_000 < rate < 27_000
    assert " MiB that are left there last about " in said


@pytest.mark.parametrize(
    ("mib", "grows"),
    [
        ([100 + 10 * n for n in range(12)], True),
        ([100 + 10 * n + 5 * (-1) ** n for n in range(12)], True),
        ([100 + 10 * n for n in range(9)], False),  # not long enough
        ([100 + n for n in range(12)], False),  # not enough
        ([100] * 11 + [500], False),  # one jump
        ([100 + min(10 * n, 60) for n in range(20)], False),  # has come to rest
        ([500 - 10 * n for n in range(12)], False),
    ],
)
def test_only_a_steady_rise_counts(mib: list[float], grows: bool) -> None:
    series = Series()
    for iteration, value in enumerate(mib):
        series.add(50 * iteration, value)
    slope = series.slope(least_mib=40)
    assert (slope > 0) == grows
    if grows:
        assert slope == pytest.approx(0.2, rel=0.1)
