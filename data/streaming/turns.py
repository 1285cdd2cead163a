"""Whose turn it is: source, stream and number there of each global sample, from its own number and the weights alone.

The S streams take turns, and each is a blend by itself: of every source's stream of its own number. So the data rank
that reads stream s reads stream s of each source and no other rank does, whatever the weights; if sources took turns
first, each rank would tokenise all streams of all sources.

Stream s takes its sources from the blend's table (data/blend.py) from position s on. So of n samples in a row of one
stream, or of n streams in a row (a global batch), each source has its weight times n, within 2.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from data.blend import Blend


@dataclass(frozen=True)
class Turns:
    """The order of samples of one source's streams or several sources'."""

    blend: Blend
    """One source: `data.blend.alone`."""
    begin: int
    """The global sample that is the first of this order."""
    starts: np.ndarray
    """Samples that were read before it, of each stream of each source: [sources, S] int64."""

    @property
    def count(self) -> int:
        """S, of streams."""
        return self.starts.shape[1]

    def assign(self, sample_indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Source, stream and number in that stream of global samples [n] int64: each [n]."""
        rounds, streams = np.divmod(sample_indices - self.begin, self.count)
        sources, earlier = self.blend.assign(rounds + streams)
        return sources, streams, self.starts[sources, streams] + earlier - self._first[sources, streams]

    def ends(self, consumed_samples: int) -> np.ndarray:
        """How many samples of each stream of each source lie before that global sample: [sources, S] int64."""
        rounds, more = divmod(consumed_samples - self.begin, self.count)
        streams = np.arange(self.count)
        return self.starts + self._before(rounds)[:, streams + (streams < more)] - self._first

    @cached_property
    def _first(self) -> np.ndarray:
        return self._before(0)[:, :-1]

    def _before(self, position: int) -> np.ndarray:
        """Of the table's first `position` … `position` + S entries, those of each source: [sources, S + 1] int64."""
        counts = np.zeros((len(self.blend.units), self.count + 1), np.int64)
        sources, _ = self.blend.assign(np.arange(position, position + self.count))
        counts[sources, np.arange(self.count) + 1] = 1
        counts[:, 0] = self.blend.counts(position)
        return counts.cumsum(1)


def in_turn(samples: int, count: int) -> np.ndarray:
    """How many of the first `samples` samples each of `count` streams gives, where they take turns: [count] int64."""
    return -(-(samples - np.arange(count, dtype=np.int64)) // count)
