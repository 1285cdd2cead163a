"""The loop, and where callbacks attach: start, before step, update, after step, after save, stop, and requests."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

from training.config.checkpoint_config import CheckpointConfig
from training.config.train_config import TrainConfig
from training.progress import Progress
from training.step import StepRequests, StepResult

Reason = Literal["done", "stage", "exit_interval", "requested"]


class Callback:
    """Something that watches or accompanies training. The loop calls each method; the default does nothing.

    All ranks hold the same callbacks and call them at the same moments, so one may use collectives.
    """

    def start(self, progress: Progress) -> None:
        """Before the first step of this process."""

    def requests(self) -> StepRequests:
        """What this rank would like after the coming step; all ranks' requests travel in the loss's reduction."""
        return StepRequests()

    def before_step(self, progress: Progress) -> None:
        """Before an iteration reads its data."""

    def before_update(self) -> None:
        """Before weights change, in a step whose update happens: gradients are reduced and not clipped yet."""

    def after_step(self, progress: Progress, result: StepResult) -> None:
        """After an iteration; ``progress`` counts it."""

    def after_save(self, progress: Progress, path: Path, stall_s: float) -> None:
        """After a checkpoint is complete; training stood still for ``stall_s``."""

    def stop(self, progress: Progress, reason: Reason) -> None:
        """After the last step of this process."""


def run(
    train: TrainConfig,
    checkpoint: CheckpointConfig,
    progress: Progress,
    step: Callable[[Progress, StepRequests], tuple[Progress, StepResult]],
    save: Callable[[Progress], tuple[Path, float]],
    callbacks: Sequence[Callback],
    at_end: Reason = "done",
) -> tuple[Progress, Reason]:
    """Train from ``progress`` to ``train_iters``, to a multiple of ``exit_interval``, or until a rank asks to stop.

    at_end: why training stops at ``train_iters``; "stage" where another one follows.

    The last state is always saved. Every rank decides alike: from counts, or from requests that the step merged.
    """
    saved = progress.iteration
    for callback in callbacks:
        callback.start(progress)
    reason: Reason | None = at_end if progress.iteration >= train.train_iters else None
    while reason is None:
        for callback in callbacks:
            callback.before_step(progress)
        progress, result = step(progress, merge(callback.requests() for callback in callbacks))
        for callback in callbacks:
            callback.after_step(progress, result)
        reason = why_stop(train, progress, result, at_end)
        interval = checkpoint.save_interval
        due = result.requests.save or (interval is not None and progress.iteration % interval == 0)
        if due or (reason is not None and saved != progress.iteration):
            path, stall_s = save(progress)
            saved = progress.iteration
            for callback in callbacks:
                callback.after_save(progress, path, stall_s)
    for callback in callbacks:
        callback.stop(progress, reason)
    return progress, reason


def why_stop(train: TrainConfig, progress: Progress, result: StepResult, at_end: Reason = "done") -> Reason | None:
    """Whether the step that led to ``progress`` was this process's last, and why."""
    if result.requests.finish or (progress.iteration >= train.train_iters and at_end == "done"):
        return "done"
    if result.requests.stop:
        return "requested"
    if train.exit_interval is not None and progress.iteration % train.exit_interval == 0:
        return "exit_interval"
    return at_end if progress.iteration >= train.train_iters else None


def merge(requests: Iterable[StepRequests]) -> StepRequests:
    """What at least one of them asks for."""
    asked = list(requests)
    return StepRequests(
        stop=any(one.stop for one in asked),
        save=any(one.save for one in asked),
        finish=any(one.finish for one in asked),
    )
