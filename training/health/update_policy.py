"""What stands between gradients and the update: NaN and Inf, jumps, overflows, and replicas that differ."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from data.loader import Batch
from parallel.groups import Ranks
from program.errors import SharedFault
from program.schema import Count, structured
from training.config.small_sections import FaultConfig
from training.health.nonfinite import NonFinite
from training.health.replica_check import Replicas
from training.health.skipped_batches import SkippedBatches
from training.health.skipping import Skipping
from training.loop import Callback
from training.progress import Progress
from training.run_dir.history import Note, unnoted
from training.step import GradientResult, StepAgain, StepResult, UpdateDecision, skip_overflows


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


class HealthPolicy(Callback):
    """Stands before the update, and lets those pass that are sound. It decides by numbers that are the same on every
    rank."""

    def __init__(
        self,
        fault: FaultConfig,
        nonfinite: NonFinite,
        replicas: Replicas | None,
        skipped_batches: SkippedBatches,
        skipping: Skipping,
        ranks: Ranks,
        note: Note = unnoted,
    ) -> None:
        self.fault, self.nonfinite, self.replicas, self.ranks, self.note = fault, nonfinite, replicas, ranks, note
        self.skipped_batches, self.skipping = skipped_batches, skipping
        self.spikes = Spikes(SPIKE_WINDOW, SPIKE_SIGMA)
        self.overflows = Overflows()
        self.progress = Progress()

    def before_step(self, progress: Progress) -> None:
        self.progress = progress
        self.nonfinite.begin()

    def decide(self, gradients: GradientResult) -> UpdateDecision:
        """Whether weights are updated with these gradients. Raises SharedFault, on every rank, where training must not
        go on."""
        if self._is_due():  # now every rank has gathered all weights, and they are those that were computed with
            assert self.replicas is not None
            self.replicas.check(self.progress)
        listed = self.skipping.holds(self.progress.iteration + 1)
        if listed or self.skipped_batches.holds(*self._batch(gradients)):
            self.nonfinite.before.restore_buffers()
            by = "train.iterations_to_skip" if listed else self.skipped_batches.path
            text = f"{self._now()}: its update is skipped, as {by} says"
            self.ranks.say(text)
            self.note("skipped", self.progress.iteration + 1, text=text)
            return UpdateDecision.SKIP
        if not gradients.finite:
            return UpdateDecision.REPLAY
        self.nonfinite.skips = 0
        if hopeless := self.overflows.hopeless(gradients, self.progress):
            raise SharedFault(hopeless)
        return skip_overflows(gradients) if gradients.overflowed or self._passes(gradients) else UpdateDecision.SKIP

    def replay(self, step: StepAgain, first: StepResult, microbatches: Sequence[Batch | None]) -> StepResult:
        """The step that counts, after ``decide`` answered REPLAY."""
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
            self.note("spike", self.progress.iteration + 1, skipped=policy == "skip", text=f"{text}{passed}")
        if policy == "skip":
            self.nonfinite.before.restore_buffers()
        return policy != "skip"

    def _roll_back(self, gradients: GradientResult) -> str:
        """Note the batch for the next start, and say what that will do."""
        problem = self.skipped_batches.add(*(batch := self._batch(gradients)))
        noted = f", which could not be written: {problem}" if problem else ""
        return (
            "Ended before its update (fault.spike); started again, the run continues its newest checkpoint and skips "
            f"the update of samples {batch[0]} to {batch[1] - 1} ({self.skipped_batches.path}{noted})"
        )

    def _batch(self, gradients: GradientResult) -> tuple[int, int]:
        """Positions of its first sample, and behind its last one."""
        gaps, consumed = self.skipping.gaps, self.progress.consumed_samples
        return gaps.behind(consumed + 1) - 1, gaps.behind(consumed + gradients.samples)

    def _now(self) -> str:
        return f"iteration {self.progress.iteration + 1}"


MOST_OVERFLOWS = 10
"""In a row, at the lowest loss scale, after which no further one will do."""


class Overflows:
    """Counts them. The same on every rank, as the loss scale is."""

    def __init__(self) -> None:
        self.in_a_row = 0

    def hopeless(self, gradients: GradientResult, progress: Progress) -> str | None:
        """In words, why training cannot go on with what overflows; None while the loss scale may still help."""
        self.in_a_row = self.in_a_row + 1 if gradients.overflowed and gradients.scale_is_lowest else 0
        if self.in_a_row < MOST_OVERFLOWS:
            return None
        return (
            f"iteration {progress.iteration + 1}: fp16 gradients have overflowed in {self.in_a_row} iterations in a "
            f"row, while the loss ({gradients.loss:g}) is finite, at loss scale {gradients.loss_scale:g}, which goes "
            "no lower (precision.min_loss_scale, or a fixed precision.loss_scale). No weight was changed in any of "
            'them. precision.dtype = "bf16" does not overflow; or lower optimizer.lr, which may have led here'
        )


SPIKE_SIGMA = 6.0
"""Standard deviations above the mean that make a jump: OLMo-core's rule. Noise of 6 sigma comes once in 10^9
iterations, and the batches that hurt a run jump by tens."""
SPIKE_WINDOW = 128
"""Iterations that a jump is measured against, OLMo-core's too; nothing is one before half of them are known."""
FLOOR = 1e-3
"""Least standard deviation, as a share of the mean."""


class Spikes:
    """Whether an iteration's loss or gradient norm jumps. The same numbers give the same answers after a resume.

    The rule is that of OLMo-core's SkipStepOptimizer (src/olmo_core/optim/skip_step_optimizer.py): 6 standard
    deviations from the mean of 128 iterations, once half of them are known; what jumped enters the window too, so that
    a new level is soon no jump. Different here: only upwards, and a deviation counts as at least FLOOR of the mean,
    lest a loss that stands still should jump by its last digit.
    """

    def __init__(self, window: int, sigma: float) -> None:
        self.sigma = sigma
        self.losses: deque[float] = deque(maxlen=window)
        self.norms: deque[float] = deque(maxlen=window)
        self.quiet = True
        """The last iteration was no jump: of several in a row, one is reported."""

    def jump(self, loss: float, norm: float) -> str | None:
        """What jumped, in words, or None; both enter the window. Finite numbers only."""
        found = [
            text
            for name, value, before in (("loss", loss, self.losses), ("gradient norm", norm, self.norms))
            if (text := self._jump(name, value, before))
        ]
        self.losses.append(loss)
        self.norms.append(norm)
        return " and ".join(found) or None

    def _jump(self, name: str, value: float, before: deque[float]) -> str | None:
        if len(before) < (before.maxlen or 0) // 2:
            return None
        mean = math.fsum(before) / len(before)
        spread = math.sqrt(math.fsum((one - mean) ** 2 for one in before) / (len(before) - 1))
        deviation = max(spread, FLOOR * abs(mean))
        if value <= mean + self.sigma * deviation:
            return None
        return (
            f"{name} {value:.4g} is {(value - mean) / deviation:.1f} sigma above {mean:.4g}, its mean of {len(before)}"
        )

    def state(self) -> dict[str, Any]:
        """For a checkpoint: floats keep every bit in JSON."""
        return {"losses": list(self.losses), "norms": list(self.norms), "quiet": self.quiet}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Inverse of ``state``; of a longer window, the newest part."""
        self.losses.extend(state["losses"])
        self.norms.extend(state["norms"])
        self.quiet = state["quiet"]
