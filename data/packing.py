"""Best-fit packing (``data.packing``): which documents, and pieces of long ones, share a sample.

Ding et al., "Fewer Truncations Improve Language Modeling", arXiv:2404.10830: a document longer than a sample is cut
into whole samples and a rest. Rests and short documents go, the longest first, each into the sample with the least room
that holds it, or into a new one; none is cut again. Of samples with the same room, the one that came to it first takes.

Documents of one length are placed together, and samples with one room are one queue: the work grows with the lengths
that occur, not with documents times samples. It needs lengths alone, so that the same plan is made on any machine.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from data.config import DataConfig
from data.shards import Shard
from data.sources import inputs_of, named
from data.split import split_shards


class Placement(NamedTuple):
    """Documents of one length that go into samples with one room."""

    length: int
    """In tokens, as the room."""
    room: int
    """Before they come; the whole sample, of new ones."""
    samples: int
    each: int
    """Documents that each of these samples takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waste:
    """What packing costs."""

    documents: int
    cut: int
    """Documents longer than a sample."""
    samples: int
    padding: int
    """Tokens, in all samples."""
    capacity: int
    """Tokens a sample."""

    def __str__(self) -> str:
        share = self.padding / (self.samples * self.capacity)
        return (
            f"{self.documents:,} documents in {self.samples:,} samples, {share:.3%} padding; "
            f"{self.cut:,} are longer than a sample and cut"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The samples of one source; pieces are documents, or parts of long ones, those of a sample side by side."""

    starts: np.ndarray
    """Of each piece in the stream of tokens: [pieces] int64."""
    sizes: np.ndarray
    """Its tokens: [pieces] int32."""
    firsts: np.ndarray
    """First piece of each sample, and the number of all: [samples + 1] int64."""


def train_lengths(shards: Iterable[Shard], split: str) -> np.ndarray:
    """Tokens of every document of the train split, [documents] int64. Reads the lengths in every index.

    split: data.split. Raises UserError where an index is damaged.
    """
    opened = list(shards)
    dealt = split_shards([shard.document_count for shard in opened], split)
    parts = ((shard, splits["train"]) for shard, splits in zip(opened, dealt, strict=True))
    return np.concatenate([shard.document_lengths()[own.start : own.stop] for shard, own in parts])


def planned(config: DataConfig, seq_length: int) -> dict[str, Waste]:
    """What packing each source of finished shards costs, by its name; nothing is written. Raises UserError for what is
    missing or damaged."""
    found = {}
    for source in named(config):
        given = inputs_of(source, config)
        if given.prefixes and not given.raw_files:
            lengths = train_lengths([Shard(prefix, check_ends=False) for prefix in given.prefixes], config.split)
            found[source.name] = waste(lengths, seq_length + 1)
    return found


def waste(lengths: np.ndarray, capacity: int) -> Waste:
    """What best-fit packing of documents of these lengths [documents] costs, without the plan itself."""
    new = (one.samples for one in placements(_counts(lengths, capacity), capacity) if one.room == capacity)
    samples = sum(new)
    return Waste(
        documents=int(np.count_nonzero(lengths)),
        cut=int(np.count_nonzero(lengths > capacity)),
        samples=samples,
        padding=samples * capacity - int(lengths.sum()),
        capacity=capacity,
    )


def best_fit(lengths: np.ndarray, capacity: int) -> Plan:
    """Pack documents of these lengths [documents] int64, which follow one another in a stream of tokens, into samples
    of ``capacity`` tokens. Takes some 80 bytes of memory a document."""
    starts, sizes = _pieces(lengths, capacity)
    longest_first = np.argsort(-sizes, kind="stable")
    samples = np.empty(len(sizes), np.int64)
    waiting: dict[int, deque[np.ndarray]] = {}
    at = opened = 0
    for one in placements(_counts(lengths, capacity), capacity):
        if one.room == capacity:
            chosen = np.arange(opened, opened + one.samples)
            opened += one.samples
        else:
            chosen = _taken(waiting[one.room], one.samples)
        count = one.samples * one.each
        samples[at : at + count] = np.repeat(chosen, one.each)
        waiting.setdefault(one.room - one.each * one.length, deque()).append(chosen)
        at += count
    by_sample = longest_first[np.argsort(samples, kind="stable")]
    firsts = np.concatenate([[0], np.cumsum(np.bincount(samples, minlength=opened))])
    return Plan(starts=starts[by_sample], sizes=sizes[by_sample].astype(np.int32), firsts=firsts)


def placements(counts: np.ndarray, capacity: int) -> Iterator[Placement]:
    """How best-fit-decreasing goes, step by step. counts: documents of each length, [capacity + 1]."""
    held: dict[int, int] = {}
    rooms: list[int] = []
    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            at = bisect_left(rooms, length)
            room = rooms[at] if at < len(rooms) else capacity
            each = min(left, room // length)
            samples = min(left // each, held.get(room, left))
            yield Placement(length, room, samples, each)
            left -= samples * each
            if room < capacity:
                held[room] -= samples
                if not held[room]:
                    rooms.pop(at)
            if rest := room - each * length:
                if not held.get(rest):
                    insort(rooms, rest)
                held[rest] = held.get(rest, 0) + samples


def _pieces(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Starts and sizes of what is placed, in the order of the stream: [pieces] int64 each."""
    counts = -(-lengths // capacity)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(np.cumsum(lengths) - lengths, counts) + number * capacity
    return starts, np.minimum(capacity, np.repeat(lengths, counts) - number * capacity)


def _counts(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Pieces of each length, [capacity + 1] int64."""
    counts = np.bincount(lengths % capacity, minlength=capacity + 1)
    counts[0], counts[capacity] = 0, (lengths // capacity).sum()
    return counts


def _taken(queue: deque[np.ndarray], count: int) -> np.ndarray:
    """The first ``count`` of a queue of samples, which leave it."""
    found = []
    while count:
        first = queue.popleft()
        if len(first) > count:
            queue.appendleft(first[count:])
        found.append(first[:count])
        count -= len(found[-1])
    return np.concatenate(found)
