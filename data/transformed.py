"""Samples that are changed on their way from the disk: by data.transform, then by fill-in-the-middle (data/fim.py).

What a change draws is a function of the seed, the split and the global sample number alone: the same on every rank that
reads a sample, in any layout, and after a resume.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

import numpy as np

from data.prepared import Samples, SourcedSamples, SourceProgress, Transform
from data.split import SPLITS, SplitName
from program.errors import UserError

REMEMBERED = 16
"""Fetches whose counts are kept; a reader is fewer ahead."""


class Change(Protocol):
    """What happens to each sample."""

    key: int
    """Its random numbers are its own."""
    metrics: tuple[str, ...]
    """What it counts."""

    def __call__(self, tokens: np.ndarray, sample: int, bits: np.random.PCG64) -> tuple[np.ndarray, Mapping[str, int]]:
        """Tokens [seq_length + 1] int32 of a global sample -> as many, and what it counts. tokens: not to be kept."""
        ...


class UsersChange:
    """``data.transform``, and whether what it returns can be trained on."""

    key = 0
    metrics: tuple[str, ...] = ("transformed_samples",)

    def __init__(self, path: str, transform: Transform, vocab_size: int) -> None:
        self.path, self.transform, self.vocab_size = path, transform, vocab_size

    def __call__(self, tokens: np.ndarray, sample: int, bits: np.random.PCG64) -> tuple[np.ndarray, Mapping[str, int]]:
        """Raises UserError for a result that is no sample; whatever the function raises."""
        found = self.transform(tokens.copy(), sample, np.random.Generator(bits))
        if problem := self._problem(found, tokens.shape):
            raise UserError(f'data.transform "{self.path}": sample {sample}: {problem}')
        return found, {"transformed_samples": int(not np.array_equal(found, tokens))}

    def _problem(self, found: object, shape: tuple[int, ...]) -> str:
        if not isinstance(found, np.ndarray) or found.shape != shape or found.dtype != np.int32:
            kind = f"{found.dtype} {list(found.shape)}" if isinstance(found, np.ndarray) else type(found).__name__
            return f"expected a numpy array int32 {list(shape)}, as it was given, found {kind}. Return as many tokens."
        wrong = np.flatnonzero((found >= self.vocab_size) | (found < -self.vocab_size))
        if not wrong.size:
            return ""
        return (
            f"expected ids below the vocabulary's {self.vocab_size}, or ~id for no loss, found {found[wrong[0]]} at "
            f"token {wrong[0]}."
        )


class Transformed:
    """The same samples, each after all changes in turn."""

    def __init__(self, inner: Samples, changes: Sequence[Change], seed: int, split: SplitName) -> None:
        self.inner, self.changes, self.seed, self.split = inner, changes, seed, SPLITS.index(split)
        self.seq_length = inner.seq_length
        self.counted: deque[Counter[str]] = deque(maxlen=REMEMBERED)
        """By metric, of each fetch, the oldest first."""

    def fetch(self, sample_indices: np.ndarray) -> np.ndarray:
        """Tokens [n, seq_length + 1] int32 of global sample indices [n] int64. Raises what the changes raise."""
        windows = self.inner.fetch(sample_indices)
        counted = Counter({name: 0 for change in self.changes for name in change.metrics})
        for row, sample in zip(windows, sample_indices.tolist(), strict=True):
            for change in self.changes:
                seeds = np.random.SeedSequence(self.seed, spawn_key=(self.split, change.key, sample))
                row[:], found = change(row, sample, np.random.PCG64(seeds))
                counted.update(found)
        self.counted.append(counted)
        return windows

    def sources(self, consumed_samples: int) -> dict[str, SourceProgress]:
        """How far each source has been read after the first `consumed_samples` samples, by its name."""
        return self.inner.sources(consumed_samples)


class SourcedTransformed(Transformed):
    """Of samples of which it is known where each comes from."""

    @property
    def names(self) -> list[str]:
        """Of the sources."""
        return cast(SourcedSamples, self.inner).names

    def source_of(self, sample_indices: np.ndarray) -> np.ndarray:
        """Number in `names` of the source of each sample: [n]."""
        return cast(SourcedSamples, self.inner).source_of(sample_indices)


def transformed(inner: Samples, changes: Sequence[Change], seed: int, split: SplitName) -> Samples:
    """The samples with these changes; as they are without any."""
    if not changes:
        return inner
    kind = SourcedTransformed if isinstance(inner, SourcedSamples) else Transformed
    return kind(inner, changes, seed, split)


def unchanged(samples: Samples) -> Samples:
    """The samples as they are read."""
    return samples.inner if isinstance(samples, Transformed) else samples
