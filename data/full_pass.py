"""A split from its first token to its last, each predicted once: for a loss that is all of it, not a sample."""

import numpy as np

from data.prepared import NO_TOKEN, SourceProgress
from data.source import BlendedSource
from data.token_source import TokenSource


class FullPass:
    """Samples in the order of the text, source after source; the last of each source is filled up with NO_TOKEN.

    Of a source of n tokens, n - 1 are predicted: all but the first, and none twice.
    """

    def __init__(self, source: TokenSource | BlendedSource) -> None:
        self.seq_length = source.seq_length
        self.parts = source.opened if isinstance(source, BlendedSource) else [source]
        self.names = source.names if isinstance(source, BlendedSource) else ["data"]
        self._ends = np.cumsum([_samples(part) for part in self.parts])
        self.count = int(self._ends[-1])
        """Samples in all."""

    def source_of(self, sample_indices: np.ndarray) -> np.ndarray:
        """Number in `names` of the source of each sample: [n]."""
        return np.searchsorted(self._ends, sample_indices, side="right")

    def fetch(self, sample_indices: np.ndarray) -> np.ndarray:
        """Tokens [n, seq_length + 1] int32 of samples [n] int64 below `count`. Raises as TokenSource.fetch."""
        samples = np.full((len(sample_indices), self.seq_length + 1), NO_TOKEN, np.int32)
        sources = self.source_of(sample_indices)
        for number in np.unique(sources).tolist():
            part = self.parts[number]
            windows = sample_indices - self._ends[number] + _samples(part)
            whole = np.flatnonzero((sources == number) & (windows < part.samples_per_epoch))
            samples[whole] = part.read_windows(windows[whole], sample_indices[whole])
            for row in np.flatnonzero((sources == number) & (windows == part.samples_per_epoch)):
                rest = part.read_rest()
                samples[row, : len(rest)] = rest
        return samples

    def sources(self, consumed_samples: int) -> dict[str, SourceProgress]:
        """A full pass is one epoch; nothing asks."""
        return {}


def _samples(part: TokenSource) -> int:
    """Windows, and one more where tokens are left behind the last of them."""
    return part.samples_per_epoch + (part.token_count - 1 > part.samples_per_epoch * part.seq_length)
