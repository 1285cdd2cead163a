"""When to save: by the clock (``checkpoint.save_interval_minutes``), and how often it pays."""

import time
from collections.abc import Callable
from pathlib import Path

from training.checkpoint.young_daly import advice, mtbf_s
from training.config.small_sections import FaultConfig
from training.loop import Callback
from training.progress import Progress
from training.step import StepRequests

SETTLED_S = 600.0
"""Before it the intervals are those of a trial run."""
LEAST_GAIN = 0.01
"""Share of the time that must be won."""


class SaveInterval(Callback):
    """After the second save and ten minutes, one line where another interval would win a hundredth of the time.

    stalled_s: seconds for which all saves so far have held training up, those in the updates behind them included.
    """

    def __init__(
        self,
        fault: FaultConfig,
        world_size: int,
        stalled_s: Callable[[], float],
        say: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.mtbf_s = mtbf_s(world_size, fault.failures_per_gpu_hour)
        self.stalled_s, self.say = stalled_s, say
        self.clock, self.began_s = clock, clock()
        self.saves, self.first_s, self.first_iteration, self.advised = 0, 0.0, 0, False

    def after_save(self, progress: Progress, path: Path, stall_s: float) -> None:
        now_s = self.clock()
        self.saves += 1
        if self.saves == 1:
            self.first_s, self.first_iteration = now_s, progress.iteration
            return
        if self.advised or now_s - self.began_s < SETTLED_S:
            return
        self.advised = True
        earlier = self.saves - 1  # of the newest save, the update behind it may still have to wait
        text = advice(
            (now_s - self.first_s) / earlier,
            round((progress.iteration - self.first_iteration) / earlier),
            (self.stalled_s() - stall_s) / earlier,
            self.mtbf_s,
            LEAST_GAIN,
        )
        if text is not None:
            self.say(text)


class SaveClock(Callback):
    """Requests a checkpoint when ``minutes`` have passed since the last one. Only rank 0's clock counts."""

    def __init__(self, minutes: float | None, rank: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self.rank, self.clock = None if minutes is None else minutes * 60, rank, clock
        self.last_s = clock()

    def requests(self) -> StepRequests:
        due = self.seconds is not None and self.rank == 0 and self.clock() - self.last_s >= self.seconds
        return StepRequests(save=due)

    def after_save(self, progress: Progress, path: Path, stall_s: float) -> None:
        self.last_s = self.clock()
