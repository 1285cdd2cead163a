"""Where an order of samples begins, and how far its sources had been read before: of a run whose data changes.

In the first order of a run, global sample i is sample i of its source or blend. One that begins at global sample b,
with other weights, sources or lengths of samples, counts i - b in its blend; and each source goes on where it was left,
as long as its samples are the same ones. So no window is read again before all are, whatever the weights were. Of what
is streamed each stream is counted, since a blend does not read all of them equally far; and one goes on with samples of
another length, too, with the first that holds nothing which was read: less than a sample of each stream is left out.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from data import blend
from data.config import DataConfig
from data.prepared import Prepared
from data.streaming.turns import Turns, in_turn


class Read(NamedTuple):
    """How far a source has been read."""

    order: str
    """Seed of its permutation."""
    samples: int
    streams: tuple[int, ...] = ()
    """Of it, of each stream, where they were not read in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderBegin:
    """The beginning of an order."""

    samples: int = 0
    """Global samples before it."""
    read: Mapping[str, Read] = field(default_factory=dict)
    """Of each source that was read before, by ``source_keys``."""


RUN_BEGIN = OrderBegin()


def source_keys(prepared: Prepared, config: DataConfig, seq_length: int) -> list[str]:
    """What the samples of each source are known by, whatever it is called and wherever it lies: its tokens, how long a
    sample is, which documents train, and how they are packed. What data.stream names is one source."""
    cut = f"{seq_length} {config.split}" + f" {config.packing}" * (config.packing != "concatenate")
    if prepared.blend is None and (prepared.streams or not prepared.sources):
        return [f"{prepared.fingerprint} {cut}"]
    seen, found = Counter[str](), []
    for source in prepared.sources:
        key = f"{source.fingerprint} {cut}"
        found.append(f"{key} {seen[key]}" if seen[key] else key)  # a source that a blend names twice
        seen[key] += 1
    return found


def orders(prepared: Prepared, config: DataConfig, seq_length: int, seed: int, begin: OrderBegin) -> list[Read]:
    """Of each source, the seed of its permutation and the samples that were read of it before this order."""
    keys = source_keys(prepared, config, seq_length)
    alone = prepared.blend is None
    new = [Read(str(seed) if alone else f"{seed} source {number}", 0) for number in range(len(keys))]
    if prepared.streams:
        return [_streamed(begin.read, *each, prepared.streams[0].count) for each in zip(keys, new, strict=True)]
    return [begin.read.get(key, fresh) for key, fresh in zip(keys, new, strict=True)]


def _streamed(read: Mapping[str, Read], key: str, fresh: Read, count: int) -> Read:
    """Of a source's ``count`` streams, in samples of the key's length, what was read in samples of any length."""
    tokens, order = np.zeros(count, np.int64), fresh.order
    for seq_length, other in of_any_length(read, key):
        each = other.streams if len(other.streams) == count else in_turn(other.samples, count)
        tokens, order = np.maximum(tokens, np.array(each) * seq_length), other.order
    return _read(order, -(-tokens // int(key.split()[1])))


def of_any_length[T](found: Mapping[str, T], key: str) -> Iterator[tuple[int, T]]:
    """What there is of a source whatever the length of its samples was, with that length. Keys are ``source_keys`` or
    ``stream_keys``."""
    source, _, rest = key.split(" ", 2)
    for other, value in found.items():
        its_source, length, its_rest = (*other.split(" ", 2), "", "")[:3]
        if (its_source, its_rest) == (source, rest) and length.isdecimal():
            yield int(length), value


def read_until(
    prepared: Prepared, config: DataConfig, seq_length: int, seed: int, begin: OrderBegin, samples: int
) -> dict[str, Read]:
    """How far each source has been read after ``samples`` global samples: what the next order begins with."""
    keys, before = source_keys(prepared, config, seq_length), orders(prepared, config, seq_length, seed, begin)
    if prepared.streams:
        ends = turns(prepared, config, seq_length, seed, begin).ends(samples)
        now = [_read(one.order, own) for one, own in zip(before, ends, strict=True)]
    else:
        own = samples - begin.samples
        counts = [own] if prepared.blend is None else prepared.blend.counts(own).tolist()
        now = [Read(one.order, one.samples + count) for one, count in zip(before, counts, strict=True)]
    return {**begin.read, **dict(zip(keys, now, strict=True))}


def _read(order: str, streams: np.ndarray) -> Read:
    """streams: samples of each that were read [S] int64."""
    total = int(streams.sum())
    equally = np.array_equal(streams, in_turn(total, len(streams)))
    return Read(order, total, () if equally else tuple(streams.tolist()))


def turns(prepared: Prepared, config: DataConfig, seq_length: int, seed: int, begin: OrderBegin) -> Turns:
    """Of what is streamed, which source and stream each sample of the order comes from."""
    before, count = orders(prepared, config, seq_length, seed, begin), prepared.streams[0].count
    if prepared.blend is None and not before[0].streams:  # goes on with the stream whose turn it is
        return Turns(blend.alone(), begin.samples - before[0].samples, np.zeros((1, count), np.int64))
    starts = [one.streams if len(one.streams) == count else in_turn(one.samples, count) for one in before]
    return Turns(prepared.blend or blend.alone(), begin.samples, np.array(starts, np.int64))


def stream_keys(prepared: Prepared, config: DataConfig, seq_length: int, seed: int, begin: OrderBegin) -> list[str]:
    """What the streams of each source are known by: all that decides where their samples begin."""
    keys, read = source_keys(prepared, config, seq_length), orders(prepared, config, seq_length, seed, begin)
    return [f"{key} {one.order}" for key, one in zip(keys, read, strict=True)]
