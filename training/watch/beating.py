"""The pulse of a rank in the loop's moments."""

from training.checkpoint.progress import Progress
from training.loop import Attachment, Reason
from training.step import StepResult
from training.watch.pulse import Pulse


class Beating(Attachment):
    """Tells the watchdog which iteration this rank is in. To be the first attachment: others take their time."""

    def __init__(self, pulse: Pulse) -> None:
        self.pulse = pulse

    def start(self, progress: Progress) -> None:
        self.pulse.enter("step", progress.iteration)

    def before_step(self, progress: Progress) -> None:
        self.pulse.enter("step", progress.iteration + 1)

    def after_step(self, progress: Progress, result: StepResult) -> None:
        self.pulse.stepped()

    def stop(self, progress: Progress, reason: Reason) -> None:
        self.pulse.enter("shutdown")
