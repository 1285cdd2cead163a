"""What `prepare` leaves and batches are read from: tokenizer, shards, sources, open splits."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from data.blend import Blend
from data.shards import Shard
from data.split import SplitName
from data.streaming.opening import Streams
from data.tokenizers.base import Tokenizer

Transform = Callable[[np.ndarray, int, np.random.Generator], np.ndarray]
"""A sample's tokens [seq_length + 1] int32, its global number, and random numbers of its own -> as many tokens."""
NO_TOKEN = -1
"""Fills a sample where the text has ended."""


class SourceProgress(NamedTuple):
    """How far a source has been read."""

    samples: int
    epochs: float
    """How often it has been gone through."""


class Samples(Protocol):
    """Where batches are read from."""

    seq_length: int

    def fetch(self, sample_indices: np.ndarray) -> np.ndarray:
        """Tokens [n, seq_length + 1] int32 of global sample indices [n] int64.

        A negative one, ~id, is read as `id` and not predicted: no loss. NO_TOKEN is one of them.
        """

    def sources(self, consumed_samples: int) -> dict[str, SourceProgress]:
        """How far each source has been read after the first `consumed_samples` samples, by its name."""


@runtime_checkable
class FetchesAhead(Protocol):
    """What can have samples fetched before they are read."""

    def ask_for(self, sample_indices: np.ndarray) -> None:
        """Have what samples [n] are made of fetched. Returns at once."""


@runtime_checkable
class SourcedSamples(Protocol):
    """Samples of which it is known where each comes from."""

    names: list[str]
    """Of the sources."""

    def source_of(self, sample_indices: np.ndarray) -> np.ndarray:
        """Number in `names` of the source of each sample: [n]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSource:
    """One source of a blend, on this machine's disk."""

    name: str
    shards: tuple[Shard, ...]
    """Opened and checked, in the order of their tokens."""
    units: int
    """Its weight in units of 2^-20; 0 for what is streamed."""
    fingerprint: str
    """Hex digest of its shards, or of what is streamed."""
    tokens: int
    """0 where they are not counted: of what is streamed."""
    weight: float = 1.0
    """As it was given."""
    each: tuple[str, ...] = ()
    """The beginning of each shard's own digest: enough to tell which one has changed."""

    @property
    def prefixes(self) -> tuple[Path, ...]:
        """Of its shards."""
        return tuple(shard.prefix for shard in self.shards)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Everything that batches are read from."""

    tokenizer: Tokenizer
    shards: tuple[Shard, ...]
    """Of all sources, opened and checked, in the order of their tokens. Every split reads from these: to open ten
    thousand of them takes two or three seconds, once."""
    fingerprint: str
    """Hex digest of tokenizer, shards and weights, equal on machines that hold the same; made in O(1) a shard."""
    sources: tuple[PreparedSource, ...] = ()
    """What `shards` belong to, in the same order; none where they are one source."""
    plan: Mapping[str, int | float | str] | None = None
    """What else the order depends on: with data.order = "megatron", the samples that the whole training takes; with
    data.stream, how many streams there are and what is read of them."""
    splits: Mapping[SplitName, Samples] = field(default_factory=dict)
    """What is open already; the others are opened by build_source."""
    blend: Blend | None = None
    """Which source each sample comes from; None where there is one."""
    streams: tuple[Streams, ...] = ()
    """What data.stream names, or each source of data.stream_blend, in place of shards."""
    transform: Transform | None = None
    """What data.transform names."""
    validation_sets: Mapping[str, "Prepared"] = field(default_factory=dict)
    """What eval.validation_sets names, by name: all of each is held out."""

    @property
    def prefixes(self) -> tuple[Path, ...]:
        """Of the shards."""
        return tuple(shard.prefix for shard in self.shards)

    @property
    def fingerprints(self) -> str:
        """Of all that is read, validation sets included: equal on machines that hold the same."""
        return " ".join([self.fingerprint, *(one.fingerprint for one in self.validation_sets.values())])


def digest(parts: Sequence[str]) -> str:
    """Of texts, in their order: 32 hex digits."""
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()
