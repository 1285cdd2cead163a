"""Python's garbage collection in step on all ranks: one that collects alone keeps all others waiting."""

import gc

from training.loop import Callback, Reason
from training.progress import Progress
from training.step import StepResult


class ManualGC(Callback):
    """Collects after every ``interval``-th iteration, on each rank, and never between (Megatron's --manual-gc)."""

    def __init__(self, interval: int) -> None:
        self.interval = interval

    def start(self, progress: Progress) -> None:
        gc.disable()
        gc.collect()

    def after_step(self, progress: Progress, result: StepResult) -> None:
        if progress.iteration % self.interval == 0:
            gc.collect()

    def stop(self, progress: Progress, reason: Reason) -> None:
        gc.enable()
