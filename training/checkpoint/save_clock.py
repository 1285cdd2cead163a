"""``checkpoint.save_interval_minutes``: rank 0's clock asks for a save, and all ranks hear of it with the loss."""

import time
from collections.abc import Callable
from pathlib import Path

from training.loop import Callback
from training.progress import Progress
from training.step import StepRequests


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
