"""A second account of how far a run has come: where this start began, what it takes each iteration, its updates.

``progress`` and the optimizer's own count are what a resume goes on from. What another place says of them tells a wrong
one, whose hash fits, from a batch that was changed on resume, which no configuration tells.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

from program.schema import JSON, Count, Range, structured
from training.config.batch_schedule import BatchSchedule
from training.loop import Callback
from training.progress import Progress
from training.step import StepResult

ENTRY = "account"
"""Among the entries of ``state.json``."""
MOST_SIZES = 1 << 20
"""Of a ramp whose samples are counted."""
AtLeastOne = Annotated[int, Range(1, 1 << 62)]


class UpdateCount(Callback):
    """Counts what the optimizer has done, from outside."""

    def __init__(self, begun: Progress, batches: BatchSchedule, updates: int | None) -> None:
        """updates: that the optimizer has made until now; None for one that does not say."""
        self.begun, self.batches, self.updates = begun, batches, updates

    def after_step(self, progress: Progress, result: StepResult) -> None:
        if self.updates is not None and not result.skipped:
            self.updates += 1

    def entry(self) -> dict[str, JSON]:
        """For a checkpoint of this moment."""
        ramp = self.batches.rampup_batch_size
        return {
            ENTRY: {
                "iteration": self.begun.iteration,
                "consumed_samples": self.begun.consumed_samples,
                "global_batch_size": self.batches.global_batch_size,
                "rampup_batch_size": list(ramp) if ramp else None,
                **({"steps": [list(step) for step in self.batches.steps]} if self.batches.steps else {}),
                "updates": self.updates,
            }
        }


@dataclass(kw_only=True, slots=True, frozen=True)
class Account:
    """What ``UpdateCount`` left."""

    iteration: Count
    consumed_samples: Count
    global_batch_size: AtLeastOne
    rampup_batch_size: tuple[AtLeastOne, AtLeastOne, AtLeastOne] | None = None
    steps: tuple[tuple[Count, AtLeastOne], ...] | None = None
    updates: Count | None = None

    @property
    def batches(self) -> BatchSchedule:
        """What each iteration takes."""
        return BatchSchedule(
            global_batch_size=self.global_batch_size, rampup_batch_size=self.rampup_batch_size, steps=self.steps
        )

    @property
    def is_countable(self) -> bool:
        """Whether a run can have these sizes, and no more of them than are counted in a moment."""
        if self.rampup_batch_size is None:
            return not self.batches.problems(1, 1)
        start, increment, _ = self.rampup_batch_size
        return (self.global_batch_size - start) // increment < MOST_SIZES and not self.batches.problems(1, 1)


def account_problems(entries: Mapping[str, JSON], progress: Progress, step: int | None) -> Iterator[str]:
    """What does not fit ``progress`` and the optimizer's ``step``; nothing of a checkpoint without an account.

    step: None where the checkpoint has no optimizer.
    """
    if ENTRY not in entries:
        return
    found, problems = structured(entries[ENTRY], Account)
    if problems:
        yield f"entries.{ENTRY}.{problems[0]}"
        return
    if not found.is_countable:
        yield f"entries.{ENTRY}: expected batch sizes that a run can have, found {found.batches}"
    elif progress.iteration < found.iteration:
        yield (
            f"progress.iteration: expected {found.iteration:,} or more, where its start began, found "
            f"{progress.iteration:,}"
        )
    else:
        fits = found.batches.consumed_after(progress.iteration - found.iteration, found.consumed_samples)
        if progress.consumed_samples != fits:
            yield (
                f"progress.consumed_samples: expected {fits:,} after iteration {progress.iteration:,}, found "
                f"{progress.consumed_samples:,}"
            )
    if step is not None and found.updates is not None and step != found.updates:
        yield f"optimizer.step: expected {found.updates:,}, the updates that were made, found {step:,}"
