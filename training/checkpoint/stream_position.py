"""Where each logical stream of data.stream stands: into a checkpoint from all ranks, out of it to any others.

Under ``cursors``, by what decides where samples begin (data.order_begin.stream_keys): of each stream, by its number,
its next sample and where that begins. Of sources that a stage left out they are kept, for one that takes them up again.
"""

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from data.prepared import Samples
from data.streaming.source import InterleavedStreams
from data.transformed import unchanged
from parallel.groups import Ranks
from training.batches import BatchStream
from training.checkpoint.agreement import gathered
from training.checkpoint.state import JSON
from training.progress import Progress

ENTRY = "streams"
"""What a checkpoint's ``state.json`` has of this, among its entries."""


def noted(
    stream: BatchStream, keys: Sequence[str], progress: Progress, ranks: Ranks, before: Mapping[str, JSON]
) -> dict[str, JSON]:
    """What a checkpoint must have of the streams: a line of numbers each, from the ranks that read them. Collective.

    before: the entries of the checkpoint that this start continues.
    """
    own: list[tuple[str, int, str]] = []
    source = stream.source and unchanged(stream.source)
    if isinstance(source, InterleavedStreams) and ranks.at.pp == 0 and ranks.at.cp == 0:
        positions = zip(keys, source.position(stream.gaps.behind(progress.consumed_samples)), strict=True)
        own = [(key, number, text) for key, found in positions for number, text in found.items()]
    cursors = {key: kept for key, kept in _kept(before).items() if isinstance(kept, dict) and key not in keys}
    # Where samples are skipped, ranks that share a stream may have come to several places: the farthest counts.
    for key, number, text in sorted(gathered(own, ranks), key=lambda one: int(one[2].partition(" ")[0])):
        cursors.setdefault(key, {})[str(number)] = text
    return {ENTRY: {"cursors": dict(cursors)}}


def found(entries: Mapping[str, JSON], same_data: bool, keys: Sequence[str], count: int) -> list[dict[int, str]]:
    """Of each source, where its ``count`` streams stand, by number: what ``noted`` wrote, in any layout.

    same_data: the checkpoint was written with the data there is. keys: of the sources, as ``noted``'s.
    """
    kept = _kept(entries)
    if same_data and not any(isinstance(one, dict) for one in kept.values()):
        kept = {keys[0]: kept}  # of a version without blends
    return [_cursors(kept.get(key), count) for key in keys]


def say_missing(cursors: Sequence[Mapping[int, str]], ends: np.ndarray, ranks: Ranks) -> None:
    """Say what is read again. ends: samples that were read of each stream of each source [sources, S]."""
    missing = int((ends > 0).sum()) - sum(map(len, cursors))
    if missing > 0:
        ranks.say(
            f"data: the checkpoint does not say where {missing} of {ends.size} streams stand in this data: the first "
            f"{ends.max():,} samples of each are tokenised again, and skipped"
        )


def _kept(entries: Mapping[str, JSON]) -> dict[str, JSON]:
    entry = entries.get(ENTRY)
    kept = entry.get("cursors") if isinstance(entry, dict) else None
    return kept if isinstance(kept, dict) else {}


def _cursors(kept: JSON, count: int) -> dict[int, str]:
    """Those of ``count`` streams that ``noted`` wrote; what is none counts as missing."""
    given = kept if isinstance(kept, dict) else {}
    texts = {number: str(given.get(str(number))) for number in range(count)}
    return {number: text for number, text in texts.items() if re.fullmatch(r"\d{1,18}( \d{1,18}){1,8}", text)}


def resumed(source: Samples, cursors: Sequence[Mapping[int, str]]) -> Samples:
    """The same source, at these positions."""
    read = unchanged(source)
    if isinstance(read, InterleavedStreams):
        read.resume(cursors)
    return source


def repeated_reading(count: int, micro_batch_size: int, data_parallel_size: int) -> float:
    """How many data ranks read each stream: 1 where ``count`` is a multiple of their samples of one microbatch."""
    common = math.gcd(count, micro_batch_size * data_parallel_size)
    return data_parallel_size * min(micro_batch_size, common) / common


def say_repeated_reading(count: int, micro_batch_size: int, ranks: Ranks) -> None:
    """Warn of streams that several ranks tokenise, and name numbers of streams without."""
    times = repeated_reading(count, micro_batch_size, ranks.layout.dp)
    if times > 1:
        step = micro_batch_size * ranks.layout.dp
        ranks.say(
            f"warning: each of the {count} streams is tokenised by {times:g} of {ranks.layout.dp} data ranks, since "
            f"data.stream_count is no multiple of data-parallel size x micro_batch_size = {step}. A new run could "
            f"take {max(1, count // step) * step} or {(count // step + 1) * step}; in this one it would change the data"
        )
