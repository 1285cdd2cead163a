"""Samples that are changed on their way from the disk: by data.transform, then by fill-in-the-middle (data/fim.py).

What a change draws is a function of the seed, the split and the global sample number alone: the same on every rank that
reads a sample, in any layout, and after a resume.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping

import numpy as np

from data.prepared import FetchesAhead, Samples, SourcedSamples, SourceProgress, Transform
from data.split import SPLITS, SplitName
from program.errors import UserError

REMEMBERED = 16
"""Fetches whose counts are kept; a reader is fewer ahead."""
Change = Callable[[np.ndarray, int, np.random.PCG64], tuple[np.ndarray, Mapping[str, int]]]
"""Tokens [seq_length + 1] int32, not to be kept, of a global sample, and its random bits -> as many, and what counts by
metric, zeros too."""


def users_change(path: str, transform: Transform, vocab_size: int) -> Change:
    """``data.transform``; raises UserError for a result that cannot be trained on, and whatever the function raises."""

    def change(tokens: np.ndarray, sample: int, bits: np.random.PCG64) -> tuple[np.ndarray, Mapping[str, int]]:
        found = transform(tokens.copy(), sample, np.random.Generator(bits))
        if problem := _problem(found, tokens.shape, vocab_size):
            raise UserError(f'data.transform "{path}": sample {sample}: expected {problem}')
        return found, {"transformed_samples": int(not np.array_equal(found, tokens))}

    return change


def _problem(found: object, shape: tuple[int, ...], vocab_size: int) -> str:
    if not isinstance(found, np.ndarray) or found.shape != shape or found.dtype != np.int32:
        kind = f"{found.dtype} {list(found.shape)}" if isinstance(found, np.ndarray) else type(found).__name__
        return f"a numpy array int32 {list(shape)}, as it was given, found {kind}. Return as many tokens."
    wrong = np.flatnonzero((found >= vocab_size) | (found < -vocab_size))
    where = f"found {found[wrong[0]]} at token {wrong[0]}." if wrong.size else ""
    return where and f"ids below the vocabulary's {vocab_size}, or ~id for no loss, {where}"


class Transformed:
    """The same samples, each after all changes in turn. A change's number in ``changes`` makes its random bits."""

    def __init__(self, inner: Samples, changes: Mapping[int, Change], seed: int, split: SplitName) -> None:
        self.inner, self.changes, self.seed, self.split = inner, changes, seed, SPLITS.index(split)
        self.seq_length = inner.seq_length
        if isinstance(inner, SourcedSamples):  # so that these are, too
            self.names, self.source_of = inner.names, inner.source_of
        if isinstance(inner, FetchesAhead):
            self.ask_for = inner.ask_for
        self.counted: deque[Counter[str]] = deque(maxlen=REMEMBERED)
        """By metric, of each fetch, the oldest first."""

    def fetch(self, sample_indices: np.ndarray) -> np.ndarray:
        """Tokens [n, seq_length + 1] int32 of global sample indices [n] int64. Raises what the changes raise."""
        windows, counted = self.inner.fetch(sample_indices), Counter[str]()
        for row, sample in zip(windows, sample_indices.tolist(), strict=True):
            for number, change in self.changes.items():
                seeds = np.random.SeedSequence(self.seed, spawn_key=(self.split, number, sample))
                row[:], found = change(row, sample, np.random.PCG64(seeds))
                counted.update(found)
        self.counted.append(counted)
        return windows

    def sources(self, consumed_samples: int) -> dict[str, SourceProgress]:
        """How far each source has been read after the first `consumed_samples` samples, by its name."""
        return self.inner.sources(consumed_samples)


def unchanged(samples: Samples) -> Samples:
    """The samples as they are read."""
    return samples.inner if isinstance(samples, Transformed) else samples
