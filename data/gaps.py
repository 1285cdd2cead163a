"""Gaps: ranges in an order of samples that training never takes (``data.samples_to_skip``).

Two counters. *Consumed* samples were trained on: batches, schedules, lengths and tokens count them. A *position* is a
sample's number in the order, gaps included: after n consumed samples, n and the lengths of the gaps that were met. So
which samples an iteration takes stays a pure function of the gaps and the count, whatever the layout.

What was met stays as it was: a checkpoint keeps those gaps, and what a recipe says of samples before its position
changes nothing.
"""

from collections.abc import Sequence

import numpy as np

from program.number_ranges import NumberRange, merged

type Ranges = Sequence[NumberRange]


class Gaps:
    """The gaps of a run, ascending."""

    def __init__(self, ranges: Ranges = ()) -> None:
        self.ranges = merged(ranges)
        self._skipped = np.cumsum([0, *(end - first for first, end in self.ranges)], dtype=np.int64)
        firsts = np.array([first for first, _ in self.ranges], np.int64)
        self._met_at = firsts - self._skipped[:-1]  # in consumed samples

    def positions(self, consumed: np.ndarray) -> np.ndarray:
        """Of the samples that are taken after so many others: both [n] int64."""
        return consumed + self._skipped[np.searchsorted(self._met_at, consumed, side="right")]

    def behind(self, consumed: int) -> int:
        """The position behind the last of so many samples; a gap that begins there is not met yet."""
        return consumed + int(self._skipped[len(self.met(consumed))])

    def met(self, consumed: int) -> tuple[NumberRange, ...]:
        """Those before that position."""
        return self.ranges[: np.searchsorted(self._met_at, consumed, side="left")]


NO_GAPS = Gaps()


def continued(met: Ranges, given: Ranges, consumed: int) -> tuple[Gaps, Ranges]:
    """The gaps of a run that goes on, and what of ``given`` it has trained on, which stays trained on.

    met: gaps until now. given: the recipe's.
    """
    here = Gaps(met).behind(consumed)
    ahead = [(max(first, here), end) for first, end in given if end > here]
    before = [(first, min(end, here)) for first, end in given if first < here]
    trained = [one for one in before if not any(first <= one[0] and one[1] <= end for first, end in met)]
    return Gaps([*met, *ahead]), trained
