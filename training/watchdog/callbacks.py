"""The watchdog's part in the loop's moments: a rank's heartbeat, and requests to stop."""

from collections.abc import Callable

from training.loop import Callback, Reason
from training.progress import Progress
from training.step import StepRequests, StepResult
from training.watchdog.heartbeat import Heartbeat
from training.watchdog.stop_signal import StopSignal


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


class StopCallback(Callback):
    """This rank's request travels with the loss; all ranks stop after the same iteration."""

    def __init__(self, request: StopSignal, say: Callable[[str], None]) -> None:
        self.request, self.say = request, say

    def start(self, progress: Progress) -> None:
        self.request.training = True

    def requests(self) -> StepRequests:
        return StepRequests(stop=self.request.number is not None)

    def after_step(self, progress: Progress, result: StepResult) -> None:
        if result.requests.stop:
            self.say(f"asked to stop: a checkpoint of iteration {progress.iteration}, then the end")
