"""Whether the disk of the log files still takes lines: libraries that log say nothing when it does not."""

import os
from pathlib import Path

from parallel.groups import Ranks
from training.loop import Callback
from training.progress import Progress
from training.step import StepResult

LEAST_BYTES = 1 << 16


class LogDisk(Callback):
    """Looks, on rank 0, at every ``interval``-th iteration; says so once when the disk is full. One system call."""

    def __init__(self, folder: Path, interval: int, ranks: Ranks) -> None:
        self.folder, self.interval, self.ranks, self.said = folder, interval, ranks, False

    def after_step(self, progress: Progress, result: StepResult) -> None:
        if self.said or self.ranks.rank != 0 or progress.iteration % self.interval:
            return
        try:
            there = os.statvfs(self.folder)
        except OSError:
            return
        if there.f_blocks and there.f_bavail * there.f_frsize < LEAST_BYTES:
            self.said = True
            self.ranks.say(
                f"warning: the disk of {self.folder} is full: log lines are lost from here on; training goes on"
            )
