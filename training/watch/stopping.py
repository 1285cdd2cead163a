"""Carries requests to stop from the rank that heard them to all ranks."""

from collections.abc import Callable

from training.checkpoint.progress import Progress
from training.loop import Attachment
from training.step import StepResult, Wishes
from training.watch.request import StopRequest


class Stopping(Attachment):
    """This rank's request travels with the loss; all ranks stop after the same iteration."""

    def __init__(self, request: StopRequest, say: Callable[[str], None]) -> None:
        self.request, self.say = request, say

    def start(self, progress: Progress) -> None:
        self.request.training = True

    def wishes(self) -> Wishes:
        return Wishes(stop=self.request.number is not None)

    def after_step(self, progress: Progress, result: StepResult) -> None:
        if result.wishes.stop:
            self.say(f"asked to stop: a checkpoint of iteration {progress.iteration}, then the end")
