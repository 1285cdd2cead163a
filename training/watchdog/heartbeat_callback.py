"""The heartbeat of a rank in the loop's moments."""

from training.loop import Callback, Reason
from training.progress import Progress
from training.step import StepResult
from training.watchdog.heartbeat import Heartbeat


class HeartbeatCallback(Callback):
    """Tells the watchdog which iteration this rank is in. To be the first callback: others take their time."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self.heartbeat = heartbeat

    def start(self, progress: Progress) -> None:
        self.heartbeat.enter("step", progress.iteration)

    def before_step(self, progress: Progress) -> None:
        self.heartbeat.enter("step", progress.iteration + 1)

    def after_step(self, progress: Progress, result: StepResult) -> None:
        self.heartbeat.stepped()

    def stop(self, progress: Progress, reason: Reason) -> None:
        self.heartbeat.enter("shutdown")
