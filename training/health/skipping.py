"""What a recipe skips: samples that are never taken, and iterations without an update.

Both are in the history, in each line of metrics, and in checkpoints: the gaps that were met with the order of samples
(training/checkpoint/order_entry.py), here how many iterations it were, and the schedule, which waited for them.
"""

from collections.abc import Mapping
from dataclasses import replace

from data.gaps import Gaps
from parallel.groups import Ranks
from program.number_ranges import NumberRange, listed
from program.schema import JSON
from training.checkpoint.schedule_entry import ENTRY as SCHEDULE
from training.checkpoint.schedule_entry import entry_of
from training.config.lr_schedule import Schedule
from training.loop import Callback
from training.progress import Progress
from training.run_dir.history import Note, unnoted
from training.step import StepResult

ENTRY = "iterations_skipped"
"""Among the entries of ``state.json``: a number."""


class Skipping(Callback):
    """Counts, on every rank alike. Also a meter."""

    def __init__(
        self,
        iterations: tuple[NumberRange, ...],
        gaps: Gaps,
        schedule: Schedule,
        entries: Mapping[str, JSON],
        ranks: Ranks,
        note: Note = unnoted,
    ) -> None:
        """entries: of the checkpoint that training continues. schedule: as it was there."""
        self.iterations, self.gaps, self.schedule, self.ranks, self.note = iterations, gaps, schedule, ranks, note
        done = entries.get(ENTRY)
        self.skipped = done if isinstance(done, int) else 0
        self.consumed = 0

    def holds(self, iteration: int) -> bool:
        """Whether this iteration makes no update."""
        return any(first <= iteration < end for first, end in self.iterations)

    def after_step(self, progress: Progress, result: StepResult) -> None:
        self.consumed = progress.consumed_samples
        met = self.gaps.met(self.consumed)[len(self.gaps.met(self.consumed - result.samples)) :]
        if met:
            text = f"iteration {progress.iteration}: samples {listed(met)} are skipped (data.samples_to_skip)"
            self.ranks.say(text)
            self.note("samples_skipped", progress.iteration, text=text)
        if self.holds(progress.iteration):
            self.skipped += 1
            self.schedule = replace(self.schedule, waited_samples=self.schedule.waited_samples + result.samples)

    def report(self) -> Mapping[str, float]:
        """Since the run began; nothing of a run that skips nothing."""
        if not (self.gaps.ranges or self.iterations or self.skipped):
            return {}
        passed = self.gaps.behind(self.consumed) - self.consumed
        return {"samples_skipped": passed, "iterations_skipped": self.skipped}

    def entry(self) -> dict[str, JSON]:
        """For a checkpoint of this moment."""
        return {ENTRY: self.skipped, SCHEDULE: entry_of(self.schedule)}
