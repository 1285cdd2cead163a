"""What stands between gradients and the update: numbers that are none, jumps, and replicas that differ."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from data.loader import Batch
from parallel.errors import SharedFault
from parallel.groups import Ranks
from parallel.schema import Count, structured
from training.config.fault_config import FaultConfig
from training.health.nonfinite import NonFinite
from training.health.overflows import Overflows
from training.health.replicas import Replicas
from training.health.skipped_batches import SkippedBatches
from training.health.spikes import Spikes
from training.loop import Callback
from training.progress import Progress
from training.step import GradientResult, StepResult, UpdateDecision, UpdatePolicy, skip_overflows


@dataclass(kw_only=True, slots=True, frozen=True)
class SavedSpikes:
    """``Spikes.state``."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    quiet: bool


@dataclass(kw_only=True, slots=True, frozen=True)
class Saved:
    """``HealthPolicy.state``."""

    spikes: SavedSpikes
    passed_over: tuple[tuple[Count, Count], ...] = ()


class HealthPolicy(Callback, UpdatePolicy):
    """Lets updates pass that are sound. It decides by numbers that are the same on every rank."""

    def __init__(
        self,
        fault: FaultConfig,
        nonfinite: NonFinite,
        replicas: Replicas | None,
        skipped_batches: SkippedBatches,
        ranks: Ranks,
    ) -> None:
        self.fault, self.nonfinite, self.replicas, self.ranks = fault, nonfinite, replicas, ranks
        self.skipped_batches = skipped_batches
        self.spikes = Spikes(fault.spike_window, fault.spike_sigma)
        self.overflows = Overflows()
        self.progress = Progress()

    def before_step(self, progress: Progress) -> None:
        self.progress = progress
        self.nonfinite.begin()

    def decide(self, gradients: GradientResult) -> UpdateDecision:
        """Raises SharedFault, on every rank, where training must not go on."""
        if self._is_due():  # now every rank has gathered all weights, and they are those that were computed with
            assert self.replicas is not None
            self.replicas.check(self.progress)
        if self.skipped_batches.holds(self.progress.consumed_samples, gradients.samples):
            self.nonfinite.before.restore_buffers()
            self.ranks.say(f"{self._now()}: its update is skipped, as {self.skipped_batches.path} says")
            return UpdateDecision.SKIP
        if not gradients.finite:
            return UpdateDecision.REPLAY
        self.nonfinite.skips = 0
        if hopeless := self.overflows.hopeless(gradients, self.progress):
            raise SharedFault(hopeless)
        return skip_overflows(gradients) if gradients.overflowed or self._passes(gradients) else UpdateDecision.SKIP

    def replay(
        self,
        step: Callable[[Callable[[GradientResult], UpdateDecision]], StepResult],
        first: StepResult,
        microbatches: Sequence[Batch | None],
    ) -> StepResult:
        return self.nonfinite.replay(step, first, microbatches, self.progress)

    def state(self) -> dict[str, Any]:
        """What a resumed run must know to decide as this one would."""
        return {"spikes": self.spikes.state(), "passed_over": self.skipped_batches.state()}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Inverse of ``state``; None where a checkpoint has none. What is no such state is left out, and said."""
        if state is None:
            return
        found, problems = structured(state, Saved)
        if problems:
            self.ranks.say(f"warning: the checkpoint's loss window is left out, as it cannot be read: {problems[0]}")
            return
        self.spikes.restore(asdict(found.spikes))
        self.skipped_batches.restore(found.passed_over)

    def _is_due(self) -> bool:
        interval = self.fault.replica_check_interval
        return self.replicas is not None and (self.progress.iteration + 1) % interval == 0

    def _passes(self, gradients: GradientResult) -> bool:
        """Whether an update with finite gradients is made; says what jumped, of several in a row the first."""
        jump = self.spikes.jump(gradients.loss, gradients.mean_norm)
        first, self.spikes.quiet = self.spikes.quiet, jump is None
        policy = self.fault.spike
        if jump is None or policy == "off":
            return True
        text = f"{self._now()}: {jump}"
        if policy == "stop":
            raise SharedFault(f"{text}. Stopped before its update (fault.spike); no weight was changed.")
        if policy == "rollback":
            raise SharedFault(f"{text}. {self._roll_back(gradients)}")
        if first:
            passed = "; its update is skipped (fault.spike), as those that follow at once" if policy == "skip" else ""
            self.ranks.say(f"{text}{passed}")
        if policy == "skip":
            self.nonfinite.before.restore_buffers()
        return policy != "skip"

    def _roll_back(self, gradients: GradientResult) -> str:
        """Note the batch for the next start, and say what that will do."""
        first = self.progress.consumed_samples
        problem = self.skipped_batches.add(first, gradients.samples)
        noted = f", which could not be written: {problem}" if problem else ""
        return (
            "Ended before its update (fault.spike); started again, the run continues its newest checkpoint and skips "
            f"the update of samples {first} to {first + gradients.samples - 1} ({self.skipped_batches.path}{noted})"
        )

    def _now(self) -> str:
        return f"iteration {self.progress.iteration + 1}"
