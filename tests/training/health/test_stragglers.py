"""A rank that computes slower than the others is named; none is for less than the ratio."""

import time
from pathlib import Path
from typing import Any

import pytest

from campaign import param
from data.prepared import Prepared
from parallel import groups
from parallel.launch import Identity
from parallel.layout import Layout
from ranks import run_ranks
from tests.training.health.injected import Rank, inject, run
from training.health import stragglers
from training.health.stragglers import Stopwatch, Stragglers, peers, slowness

SHORT = ("--train.train_iters", "6", "--fault.watch_interval", "3")


class Sleeps(Rank):
    """Rank 1's first attention takes long; by a fixed time, far above what a busy machine makes of the others'."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        if self.ranks.rank == 1:
            self.module("decoder.layers.0.self_attention.core_attention").register_forward_hook(
                lambda *_: time.sleep(0.4), prepend=True
            )


@pytest.mark.parametrize(
    "flags",
    [
        param((("--train.micro_batch_size", "4"),)),  # by whole stages
        ("--train.micro_batch_size", "8", "--parallel.tensor_model_parallel_size", "2"),  # by attention alone
    ],
)
def test_a_slow_rank_is_named_once(
    flags: tuple[str, ...], prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    inject(monkeypatch, Sleeps)
    monkeypatch.setattr(stragglers, "RATIO", 4.0)
    assert run(prepared, tmp_path, 2, *SHORT, *flags) == (0, None)
    [said] = [line for line in capfd.readouterr().out.splitlines() if "slower" in line]
    assert said.startswith("rank 1 (")
    assert said.endswith(
        "x slower than its 1 peer(s) (lower quartile of 3 iterations), and all wait for it. "
        "Communication is not the cause"
    )


def _tell_many(identity: Identity) -> None:
    console = None if identity.rank else 1
    with groups.start(Layout(dp=6), identity, device="cpu", seed=1, console_fd=console) as ranks:
        watch = Stragglers(Stopwatch([], ranks), 3, ranks)
        for _ in range(3):
            watch._tell_slow({0: 1.0, 1: 2.0, 2: 1.5, 3: 4.0, 4: 1.4, 5: 3.0}, 3)


def test_of_many_slow_ranks_the_slowest_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(6, _tell_many)
    said = [line for line in capfd.readouterr().out.splitlines() if "slower" in line]
    assert [line.split(" (")[0] for line in said[:4]] == ["rank 3", "rank 5", "rank 1", "rank 2"]
    assert said[4:] == ["1 more rank(s) compute slower than their peers, by up to 1.4x"]


def test_ranks_are_compared_with_their_like() -> None:
    layout = Layout(pp=2, dp=3)
    assert peers(layout, same_stage=True) == [[0, 1, 2], [3, 4, 5]]
    assert peers(layout, same_stage=False) == [[0, 1, 2, 3, 4, 5]]
    found = slowness([1.0, 1.05, 0.95, 2.0, 2.1, 3.8], peers(layout, same_stage=True))
    assert [rank for rank, times in found.items() if times >= 1.3] == [5]
    assert found[5] == pytest.approx(3.8 / 2.1)
    assert slowness([1.0, 1.9], [[0, 1]])[1] == pytest.approx(1.9)
    assert max(slowness([1.0, 1.09, 1.02, 1.08], [[0, 1, 2, 3]]).values()) < 1.1
    assert max(slowness([1e-5, 9e-5], [[0, 1]]).values()) == 1.0  # too short to mean anything
    assert slowness([0.0, 0.0], [[0, 1]]) == {0: 1.0, 1: 1.0}
