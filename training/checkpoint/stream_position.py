"""Where each logical stream of data.stream stands: into a checkpoint from all ranks, out of it to any others."""

import math
import re
from collections.abc import Mapping

from data.prepared import Samples
from data.streaming.source import StreamedSource
from data.transformed import unchanged
from parallel.groups import Ranks
from training.batches import BatchStream
from training.checkpoint.agreement import gathered
from training.checkpoint.state import JSON
from training.progress import Progress

ENTRY = "streams"
"""What a checkpoint's ``state.json`` has of this, among its entries."""


def noted(stream: BatchStream, progress: Progress, ranks: Ranks) -> dict[str, JSON]:
    """What a checkpoint must have of the streams: a line of numbers each, from the ranks that read them. Collective."""
    own: list[tuple[int, str]] = []
    source = stream.source and unchanged(stream.source)
    if isinstance(source, StreamedSource) and ranks.at.pp == 0 and ranks.at.cp == 0:
        own = list(source.position(progress.consumed_samples).items())
    found = {str(number): text for number, text in sorted(gathered(own, ranks))}
    return {ENTRY: {"consumed_samples": progress.consumed_samples, "cursors": dict(found)}}


def found(
    entries: Mapping[str, JSON], same_data: bool, count: int, progress: Progress, ranks: Ranks, own_samples: int
) -> dict[int, str]:
    """Where streams stand, by number: what ``noted`` wrote, in any layout; says where something is missing of it.

    same_data: the checkpoint was written with the data there is. count: streams there are. own_samples: that were read
    of them, of all the run's.
    """
    if not progress.consumed_samples:
        return {}
    entry, cursors = entries.get(ENTRY), dict[int, str]()
    if same_data and isinstance(entry, dict) and entry.get("consumed_samples") == progress.consumed_samples:
        noted_cursors = entry.get("cursors")
        if isinstance(noted_cursors, dict):
            cursors = {int(number): text for number, text in noted_cursors.items() if _is_cursor(number, text)}
    missing = min(count, own_samples) - len(cursors)
    if missing:
        samples = -(-own_samples // count)
        ranks.say(
            f"data: the checkpoint does not say where {missing} of {count} streams stand in this data: the first "
            f"{samples:,} samples of each are tokenised again, and skipped"
        )
    return cursors


def _is_cursor(number: str, text: JSON) -> bool:
    """Whether an entry is one that ``noted`` wrote; what is none counts as missing."""
    return number.isdecimal() and isinstance(text, str) and re.fullmatch(r"\d{1,18}( \d{1,18}){1,8}", text) is not None


def resumed(source: Samples, cursors: Mapping[int, str]) -> Samples:
    """The same source, at these positions."""
    read = unchanged(source)
    if isinstance(read, StreamedSource):
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
