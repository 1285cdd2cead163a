"""How far a run has come."""

from dataclasses import dataclass

from program.schema import Count


@dataclass(kw_only=True, slots=True, frozen=True)
class Progress:
    """What a resumed run must know besides weights."""

    iteration: Count = 0
    """Iterations done, whether their update happened or was skipped."""

    consumed_samples: Count = 0
    """Samples trained on: the position in the data, the schedules and the batch ramp-up."""
