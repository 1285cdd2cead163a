"""Carries requests to stop from the rank that heard them to all ranks."""

from collections.abc import Callable

from training.loop import Callback
from training.progress import Progress
from training.step import StepRequests, StepResult
from training.watchdog.stop_signal import StopSignal


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
