"""Learning rate and weight decay as pure functions of consumed samples.

The curves are those of megatron.core.optimizer_param_scheduler.OptimizerParamScheduler (a test compares),
but nothing is stepped: an iteration uses the values at the samples consumed *before* it, as does Megatron,
whose counter advances by the global batch after each update. (Megatron leaves out iterations skipped for an
overflow in fp16; consumed samples include them.) The curve itself is fixed when a run starts and lies in its
checkpoints: another batch or another number of iterations on resume does not bend it. schedules.py makes a schedule
of a configuration, run_dir/kept_schedule.py chooses between that and the one of a checkpoint.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

DecayStyle = Literal["constant", "linear", "cosine", "WSD", "inverse-square-root", "power", "minus-square-root"]
WSDDecayStyle = Literal["linear", "cosine", "exponential", "minus_sqrt"]
WeightDecayStyle = Literal["constant", "linear", "cosine"]


class ScheduledRates(NamedTuple):
    """What the schedule says of one iteration."""

    learning_rate: float
    weight_decay: float
    decoupled_learning_rate: float | None = None
    """Of word embeddings and output layer, where they have one of their own."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Schedule:
    """Linear warm-up, then decay; and a ramp of weight decay. All lengths in samples."""

    lr: float
    """Learning rate at the end of the warm-up."""

    min_lr: float
    """Learning rate from the end of the decay on."""

    lr_decay_style: DecayStyle
    """constant never reaches min_lr; inverse-square-root drops to it at decay_samples."""

    warmup_samples: float
    """Length of the warm-up; 0: none. A fraction of the decay need not be whole samples, as in Megatron."""

    decay_samples: int
    """Where the decay ends, counted from the first sample of the run, warm-up included."""

    wsd_decay_samples: int = 0
    """WSD (arXiv:2404.06395): length of the final decay, which ends at decay_samples."""

    lr_wsd_decay_style: WSDDecayStyle = "exponential"
    """WSD: form of the final decay."""

    start_weight_decay: float = 0.0
    """Weight decay at the first iteration."""

    end_weight_decay: float = 0.0
    """Weight decay from weight_decay_samples on; with the constant style, always."""

    weight_decay_incr_style: WeightDecayStyle = "constant"
    """Form of the way from start to end."""

    weight_decay_samples: int = 0
    """Length of that way."""

    lr_warmup_init: float = 0.0
    """Learning rate at the first sample of the warm-up."""

    lr_decay_power: float = 1.0
    """power: what the share of the decay that remains is raised to."""

    decoupled_lr: float | None = None
    """``lr`` of word embeddings and output layer. None: they follow the rest."""

    decoupled_min_lr: float | None = None
    """Their ``min_lr``. None: that of the rest."""

    begins_at: int = 0
    """Consumed samples at which the curve begins: all else is counted from there."""

    waited_samples: int = 0
    """Samples since then over which the curve has stood still: of train.iterations_to_skip."""

    def rates(self, consumed_samples: int) -> ScheduledRates:
        """Of the iteration that starts after ``consumed_samples``."""
        apart = self.decoupled
        return ScheduledRates(
            self.learning_rate(consumed_samples),
            self.weight_decay(consumed_samples),
            None if apart is None else apart.learning_rate(consumed_samples),
        )

    def samples_on(self, consumed_samples: int) -> int:
        """How far along the curve is the iteration that starts after ``consumed_samples``."""
        return max(0, consumed_samples - self.begins_at - self.waited_samples)

    @property
    def decoupled(self) -> "Schedule | None":
        """The curve of word embeddings and output layer, where it is another."""
        if self.decoupled_lr is None:
            return None
        least = self.min_lr if self.decoupled_min_lr is None else self.decoupled_min_lr
        return replace(self, lr=self.decoupled_lr, min_lr=least, decoupled_lr=None, decoupled_min_lr=None)

    def learning_rate(self, consumed_samples: int) -> float:
        """Learning rate of the iteration that starts after ``consumed_samples``."""
        consumed_samples = self.samples_on(consumed_samples)
        if self.warmup_samples > 0 and consumed_samples <= self.warmup_samples:
            return self.lr_warmup_init + (self.lr - self.lr_warmup_init) * consumed_samples / self.warmup_samples
        if consumed_samples > self.decay_samples and self.lr_decay_style != "constant":
            return self.min_lr
        return DECAYS[self.lr_decay_style](self, consumed_samples)

    def weight_decay(self, consumed_samples: int) -> float:
        """Weight decay of the iteration that starts after ``consumed_samples``."""
        consumed_samples = self.samples_on(consumed_samples)
        if self.weight_decay_incr_style == "constant" or consumed_samples >= self.weight_decay_samples:
            return self.end_weight_decay
        progress = consumed_samples / self.weight_decay_samples
        if self.weight_decay_incr_style == "cosine":
            progress = 1.0 - _half_cosine(progress)
        return self.start_weight_decay + progress * (self.end_weight_decay - self.start_weight_decay)

    def progress(self, consumed_samples: int) -> float:
        """From 0 at the end of the warm-up to 1 at the end of the decay."""
        return (consumed_samples - self.warmup_samples) / (self.decay_samples - self.warmup_samples)

    def between(self, height: float) -> float:
        """The learning rate at a height of 0 (min_lr) to 1 (lr)."""
        return self.min_lr + (self.lr - self.min_lr) * height

    def problems(self) -> list[str]:
        """What overlaps, in samples, whatever unit its fields have."""
        found = []
        if self.lr_decay_style != "constant" and self.warmup_samples >= self.decay_samples:
            found.append(
                f"optimizer.lr_warmup_iters, _samples or _fraction ({_count(self.warmup_samples)} samples) must be "
                f"fewer than optimizer.lr_decay_iters or _samples ({_count(self.decay_samples)} samples; by default "
                "train.train_iters)."
            )
        if self.lr_warmup_init > self.lr:
            found.append(
                f"optimizer.lr_warmup_init must be at most optimizer.lr {self.lr:g}, found {self.lr_warmup_init:g}."
            )
        if self.weight_decay_incr_style == "constant" and self.start_weight_decay != self.end_weight_decay:
            found.append(
                f"optimizer.start_weight_decay {self.start_weight_decay} and .end_weight_decay "
                f"{self.end_weight_decay} differ, which optimizer.weight_decay_incr_style "
                '"constant" does not allow. Use "linear" or "cosine".'
            )
        return found

    def is_same_as(self, other: "Schedule") -> bool:
        """Whether both say the same at every sample, whatever stands in fields that their styles do not read."""
        return self._read_alone() == other._read_alone()

    def _read_alone(self) -> "Schedule":
        """The fields that count; the others at their defaults."""
        found = replace(self, waited_samples=0)
        if self.lr_decay_style == "constant":
            found = replace(found, min_lr=0.0, decay_samples=0)
        if self.lr_decay_style != "WSD":
            found = replace(found, wsd_decay_samples=0, lr_wsd_decay_style="exponential")
        if self.lr_decay_style != "power":
            found = replace(found, lr_decay_power=1.0)
        if self.weight_decay_incr_style == "constant":
            found = replace(found, start_weight_decay=0.0, weight_decay_samples=0)
        return found

    def describe(self) -> str:
        """The schedule in one line, for the log of a start and of a resume."""
        ramp = f"weight decay {self.end_weight_decay:g}"
        if self.weight_decay_incr_style != "constant":
            ramp = (
                f"weight decay {self.weight_decay_incr_style} from {self.start_weight_decay:g} to "
                f"{self.end_weight_decay:g} at {self.begins_at + self.weight_decay_samples:,} samples"
            )
        apart = f"; of embeddings and output layer {self.decoupled._described_rate()}" if self.decoupled else ""
        begin = f"from sample {self.begins_at:,} on, " if self.begins_at else ""
        return f"{begin}learning rate {self._described_rate()}{apart}; {ramp}"

    def _described_rate(self) -> str:
        warmup = ""
        if self.warmup_samples:
            warmup = f"{self.lr_warmup_init:g} to {self.lr:g} over {_count(self.warmup_samples)} samples, "
        end = self.begins_at + self.decay_samples
        decay = f"{self.lr_decay_style} from {self.lr:g} to {self.min_lr:g} at {end:,} samples"
        if self.lr_decay_style == "constant":
            decay = f"constant {self.lr:g}"
        elif self.lr_decay_style == "WSD":
            decay += f" (stable, then {self.lr_wsd_decay_style} over the last {self.wsd_decay_samples:,})"
        elif self.lr_decay_style == "power":
            decay = decay.replace("power", f"power {self.lr_decay_power:g}", 1)
        return f"{warmup}{decay}"


def _count(samples: float) -> str:
    """Samples for people, with the fraction that a fraction of others may have."""
    return f"{samples:,.15g}"


def _constant(schedule: Schedule, consumed_samples: int) -> float:
    return schedule.lr


def _linear(schedule: Schedule, consumed_samples: int) -> float:
    return schedule.between(1.0 - schedule.progress(consumed_samples))


def _cosine(schedule: Schedule, consumed_samples: int) -> float:
    return schedule.between(_half_cosine(schedule.progress(consumed_samples)))


def _power(schedule: Schedule, consumed_samples: int) -> float:
    """As transformers' ``get_polynomial_decay_schedule_with_warmup``."""
    return schedule.between((1.0 - schedule.progress(consumed_samples)) ** schedule.lr_decay_power)


def _minus_square_root(schedule: Schedule, consumed_samples: int) -> float:
    """WSD's "minus_sqrt" (arXiv:2405.18392) from the end of the warm-up on."""
    return schedule.between(_wsd_height(schedule.progress(consumed_samples), "minus_sqrt"))


def _inverse_square_root(schedule: Schedule, consumed_samples: int) -> float:
    fall = math.sqrt(max(schedule.warmup_samples, 1) / max(consumed_samples, 1))
    return max(schedule.min_lr, schedule.lr * fall)


def _wsd(schedule: Schedule, consumed_samples: int) -> float:
    start = schedule.decay_samples - schedule.wsd_decay_samples
    if consumed_samples <= start:
        return schedule.between(1.0)
    progress = (consumed_samples - start) / schedule.wsd_decay_samples
    return schedule.between(_wsd_height(progress, schedule.lr_wsd_decay_style))


def _wsd_height(progress: float, style: WSDDecayStyle) -> float:
    """How far above min_lr WSD's final decay is, from 1 at progress 0 to 0 at progress 1."""
    if style == "linear":
        return 1.0 - progress
    if style == "cosine":
        return _half_cosine(progress)
    if style == "exponential":
        return 2.0 * 0.5**progress - 1.0
    return 1.0 - math.sqrt(progress)


def _half_cosine(progress: float) -> float:
    """From 1 to 0 along half a cosine wave (arXiv:1608.03983, equation 5)."""
    return 0.5 * (math.cos(math.pi * progress) + 1.0)


DECAYS: dict[str, Callable[[Schedule, int], float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "WSD": _wsd,
    "inverse-square-root": _inverse_square_root,
    "power": _power,
    "minus-square-root": _minus_square_root,
}
"""By ``optimizer.lr_decay_style``: the learning rate between warm-up and end of decay, after consumed samples.

To add one: its name in ``DecayStyle``, its function, and its entry here."""
