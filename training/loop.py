"""The loop, and the five moments at which all else attaches: start, before step, after step, after save, stop."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

from training.checkpoint.progress import Progress
from training.config import CheckpointConfig, TrainConfig
from training.step import StepResult, Wishes

Reason = Literal["done", "exit_interval", "requested"]


class Attachment:
    """Something that watches or accompanies training. Every method is a moment; the default does nothing.

    All ranks hold the same attachments and call them at the same moments, so one may use collectives.
    """

    def start(self, progress: Progress) -> None:
        """Before the first step of this process."""

    def wishes(self) -> Wishes:
        """What this rank would like after the coming step; all ranks' wishes travel in the loss's reduction."""
        return Wishes()

    def before_step(self, progress: Progress) -> None:
        """Before an iteration reads its data."""

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
    step: Callable[[Progress, Wishes], tuple[Progress, StepResult]],
    save: Callable[[Progress], tuple[Path, float]],
    attachments: Sequence[Attachment],
) -> tuple[Progress, Reason]:
    """Train from ``progress`` to ``train_iters``, to a multiple of ``exit_interval``, or until a rank asks to stop.

    The last state is always saved. Every rank decides alike: from counts, or from wishes that the step united.
    """
    saved = progress.iteration
    for attachment in attachments:
        attachment.start(progress)
    reason: Reason | None = "done" if progress.iteration >= train.train_iters else None
    while reason is None:
        for attachment in attachments:
            attachment.before_step(progress)
        progress, result = step(progress, united(attachment.wishes() for attachment in attachments))
        for attachment in attachments:
            attachment.after_step(progress, result)
        reason = why_stop(train, progress, result)
        interval = checkpoint.save_interval
        due = result.wishes.save or (interval is not None and progress.iteration % interval == 0)
        if due or (reason is not None and saved != progress.iteration):
            path, stall_s = save(progress)
            saved = progress.iteration
            for attachment in attachments:
                attachment.after_save(progress, path, stall_s)
    for attachment in attachments:
        attachment.stop(progress, reason)
    return progress, reason


def why_stop(train: TrainConfig, progress: Progress, result: StepResult) -> Reason | None:
    """Whether the step that led to ``progress`` was this process's last, and why."""
    if progress.iteration >= train.train_iters:
        return "done"
    if result.wishes.stop:
        return "requested"
    if train.exit_interval is not None and progress.iteration % train.exit_interval == 0:
        return "exit_interval"
    return None


def united(wishes: Iterable[Wishes]) -> Wishes:
    """What at least one of them asks for."""
    all_wishes = list(wishes)
    return Wishes(stop=any(wish.stop for wish in all_wishes), save=any(wish.save for wish in all_wishes))
