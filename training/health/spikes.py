"""Jumps of loss or gradient norm against a rolling window.

The rule is that of OLMo-core's SkipStepOptimizer (src/olmo_core/optim/skip_step_optimizer.py): 6 standard deviations
from the mean of 128 iterations, once half of them are known; what jumped enters the window too, so that a new level
is soon no jump. Different here: only upwards, and a deviation counts as at least FLOOR of the mean, lest a loss that
stands still should jump by its last digit.
"""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

FLOOR = 1e-3
"""Least standard deviation, as a share of the mean."""


class Spikes:
    """Whether an iteration's loss or gradient norm jumps. The same numbers give the same answers after a resume."""

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
