"""Best-fit packing (``data.packing``): which documents, and pieces of long ones, share a sample.

Ding et al., "Fewer Truncations Improve Language Modeling", arXiv:2404.10830: a document longer than a sample is cut
into whole samples and a rest. Rests and short documents go, the longest first, each into the sample with the least room
that holds it, or into a new one; none is cut again. Of samples with the same room, the one that came to it first takes.

Documents of one length are placed together, and samples with one room are one queue: the work grows with the lengths
that occur, not with documents times samples. It needs lengths alone, so that the same plan is made on any machine.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from data.config import DataConfig
from data.shards import Shard
from data.sources import inputs_of, named
from data.split import split_shards


class Waste(NamedTuple):
    """What packing costs: documents, those longer than a sample, samples, tokens of padding, tokens a sample."""

    documents: int
    cut: int
    samples: int
    padding: int
    capacity: int

    def __str__(self) -> str:
        share = self.padding / (self.samples * self.capacity)
        placed = f"{self.documents:,} documents in {self.samples:,} samples, {share:.3%} padding"
        return f"{placed}; {self.cut:,} are longer than a sample and cut"


class Plan(NamedTuple):
    """The samples of one source, as pieces side by side: documents, or parts of long ones."""

    starts: np.ndarray
    """Of each piece in the stream of tokens: [pieces] int64."""
    sizes: np.ndarray
    """Its tokens: [pieces] int32."""
    firsts: np.ndarray
    """First piece of each sample, and the number of all: [samples + 1] int64."""


def train_lengths(shards: Sequence[Shard], split: str) -> np.ndarray:
    """Tokens of every document of the train split, [documents] int64. split: data.split. Reads the lengths in every
    index. Raises UserError where one is damaged."""
    dealt = split_shards([shard.document_count for shard in shards], split)
    parts = [(shard.document_lengths(), splits["train"]) for shard, splits in zip(shards, dealt, strict=True)]
    return np.concatenate([lengths[own.start : own.stop] for lengths, own in parts])


def planned(config: DataConfig, seq_length: int) -> dict[str, Waste]:
    """What packing each source of finished shards costs, by its name; nothing is written. Raises UserError for what is
    missing or damaged."""
    given = {source.name: inputs_of(source, config) for source in named(config)}
    shards = {name: [Shard(one, check_ends=False) for one in found.prefixes] for name, found in given.items()}
    return {
        name: waste(train_lengths(own, config.split), seq_length + 1)
        for name, own in shards.items()
        if own and not given[name].raw_files
    }


def waste(lengths: np.ndarray, capacity: int) -> Waste:
    """Of documents of these lengths [documents] in samples of ``capacity`` tokens; without the plan itself."""
    steps = placements(_counts(lengths, capacity), capacity)
    samples = sum(count for _, room, count, _ in steps if room == capacity)
    documents, cut = int(np.count_nonzero(lengths)), int(np.count_nonzero(lengths > capacity))
    return Waste(documents, cut, samples, samples * capacity - int(lengths.sum()), capacity)


def best_fit(lengths: np.ndarray, capacity: int) -> Plan:
    """Pack documents of these lengths [documents] int64, which follow one another in a stream of tokens, into samples
    of ``capacity`` tokens. Takes some 80 bytes of memory a document."""
    pieces = -(-lengths // capacity)
    cuts = (np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * capacity
    starts = np.repeat(np.cumsum(lengths) - lengths, pieces) + cuts
    sizes = np.minimum(capacity, np.repeat(lengths, pieces) - cuts)
    samples, at, opened = np.empty(len(sizes), np.int64), 0, 0
    waiting: dict[int, deque[np.ndarray]] = {}
    for length, room, count, each in placements(_counts(lengths, capacity), capacity):
        if room == capacity:
            chosen = np.arange(opened, opened + count)
            opened += count
        else:
            chosen = _taken(waiting[room], count)
        samples[at : at + count * each] = np.repeat(chosen, each)
        waiting.setdefault(room - each * length, deque()).append(chosen)
        at += count * each
    by_sample = np.argsort(-sizes, kind="stable")[np.argsort(samples, kind="stable")]
    firsts = np.concatenate([[0], np.cumsum(np.bincount(samples, minlength=opened))])
    return Plan(starts[by_sample], sizes[by_sample].astype(np.int32), firsts)


def placements(counts: np.ndarray, capacity: int) -> Iterator[tuple[int, int, int, int]]:
    """Best-fit-decreasing of counts[length] pieces, [capacity + 1], step by step: (length of the pieces, room before in
    the samples that take them, how many samples, pieces that each takes). The room of new samples is ``capacity``."""
    held, rooms = dict[int, int](), list[int]()
    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            at = bisect_left(rooms, length)
            room = rooms[at] if at < len(rooms) else capacity
            each = min(left, room // length)
            samples = min(left // each, held.get(room, left))
            yield length, room, samples, each
            left -= samples * each
            if room < capacity:
                held[room] -= samples
                if not held[room]:
                    rooms.pop(at)
            if rest := room - each * length:
                if not held.get(rest):
                    insort(rooms, rest)
                held[rest] = held.get(rest, 0) + samples


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
