"""The loop's decisions: when it saves, when it stops, and what its callbacks hear."""

from pathlib import Path

import pytest

import ranks  # noqa: F401  (imports torch and megatron once)
from training import loop
from training.checkpoint.save_interval import SaveClock
from training.config.checkpoint_config import CheckpointConfig
from training.config.train_config import TrainConfig
from training.progress import Progress
from training.step import StepRequests, StepResult, UpdateDecision


class Recorded(loop.Callback):
    """Writes down every moment; requests what it was given for an iteration."""

    def __init__(self, requests: dict[int, StepRequests] | None = None) -> None:
        self.moments: list[str] = []
        self.asked = requests or {}
        self.iteration = 0

    def start(self, progress: Progress) -> None:
        self.moments.append(f"start {progress.iteration}")
        self.iteration = progress.iteration

    def requests(self) -> StepRequests:
        return self.asked.get(self.iteration + 1, StepRequests())

    def after_step(self, progress: Progress, result: StepResult) -> None:
        self.iteration = progress.iteration
        self.moments.append(f"step {progress.iteration}")

    def after_save(self, progress: Progress, path: Path, stall_s: float) -> None:
        self.moments.append(f"save {progress.iteration}")

    def stop(self, progress: Progress, reason: str) -> None:
        self.moments.append(f"{reason} {progress.iteration}")


def step(progress: Progress, requests: StepRequests) -> tuple[Progress, StepResult]:
    result = StepResult(
        loss=1.0, tokens=1, samples=8, requests=requests, grad_norm=1.0, mean_norm=1.0, finite=True, overflowed=False,
        loss_scale=1.0, scale_is_lowest=False, learning_rate=0.1, decision=UpdateDecision.UPDATE,
    )  # fmt: skip
    return Progress(iteration=progress.iteration + 1, consumed_samples=progress.consumed_samples + 8), result


def moments(
    train: TrainConfig, checkpoint: CheckpointConfig, begin: int = 0, requests: dict[int, StepRequests] | None = None
) -> list[str]:
    recorded = Recorded(requests)
    loop.run(train, checkpoint, Progress(iteration=begin), step, lambda _: (Path("x"), 0.1), [recorded])
    return recorded.moments


def test_it_saves_at_intervals_and_at_the_end() -> None:
    assert moments(TrainConfig(train_iters=5), CheckpointConfig(save_interval=2)) == [
        "start 0", "step 1", "step 2", "save 2", "step 3", "step 4", "save 4", "step 5", "save 5", "done 5",
    ]  # fmt: skip


def test_the_last_state_is_saved_once() -> None:
    assert moments(TrainConfig(train_iters=2), CheckpointConfig(save_interval=2)).count("save 2") == 1


def test_a_finished_run_does_nothing() -> None:
    assert moments(TrainConfig(train_iters=5), CheckpointConfig(), begin=5) == ["start 5", "done 5"]


def test_exit_interval_stops_at_multiples() -> None:
    assert moments(TrainConfig(train_iters=50, exit_interval=4), CheckpointConfig(), begin=4)[-2:] == [
        "save 8",
        "exit_interval 8",
    ]


def test_a_wish_to_stop_saves_first() -> None:
    heard = moments(TrainConfig(train_iters=50), CheckpointConfig(), requests={3: StepRequests(stop=True)})
    assert heard[-3:] == ["step 3", "save 3", "requested 3"]


def test_a_wish_to_save() -> None:
    heard = moments(TrainConfig(train_iters=4), CheckpointConfig(), requests={2: StepRequests(save=True)})
    assert heard == ["start 0", "step 1", "step 2", "save 2", "step 3", "step 4", "save 4", "done 4"]


@pytest.mark.parametrize("rank", [0, 1])
def test_minutes_are_counted_by_rank_0_from_the_last_save(rank: int) -> None:
    now = [0.0]
    clock = SaveClock(2.0, rank, clock=lambda: now[0])
    now[0] = 119.0
    assert not clock.requests().save
    now[0] = 121.0
    assert clock.requests().save == (rank == 0)
    clock.after_save(Progress(), Path("x"), 0.1)
    assert not clock.requests().save
    assert not SaveClock(None, 0, clock=lambda: 1e9).requests().save
