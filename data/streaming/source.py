"""Samples of logical streams: of one source's, fetched by stream and number; and of all sources', by global index."""

from collections.abc import Mapping, Sequence
from threading import Lock

import numpy as np

from data.prepared import SourceProgress
from data.raw.reading import Rejects
from data.split import SplitName
from data.streaming.dealing import deal, held_out_count
from data.streaming.opening import Streams
from data.streaming.stream import START, Cursor, LogicalStream, Tokenising, part_of
from data.streaming.turns import Turns

REMEMBERED = 8
"""Fetches whose positions are kept: a reader is that far ahead of what has been trained on at most."""


class StreamedSource:
    """Sample i is window i div S of stream i mod S, of S streams of one source; a stream is opened when asked for.

    Fetching is quick for samples that follow the ones before, stream by stream; what lies between is tokenised and
    skipped. One thread fetches; another may ask for the position.
    """

    def __init__(self, streams: Streams, split: SplitName, weights: str, seq_length: int, seed: int | str) -> None:
        """weights: data.split.

        Raises UserError where it leaves the split nothing, or there are too many streams.
        """
        self.seq_length, reading, part = seq_length, streams.reading, part_of(split, weights)
        self.count, self.name = streams.count, streams.name
        if split != "train":
            self.count = held_out_count(streams.units, streams.count, part[1] - part[0], seq_length)
        self.how = Tokenising(
            reading=reading,
            engine=streams.engine,
            eod=streams.eod,
            split=split,
            part=part,
            rejects=Rejects(reading.on_bad_document, reading.flags),
            shuffle=streams.shuffle if split == "train" else 0,
        )
        self.shares = deal(streams.units, self.count, seed)
        self._say = streams.console if split == "train" else lambda _: None
        self._open: dict[int, LogicalStream] = {}
        self._known: dict[int, list[tuple[int, int, Cursor]]] = {}
        """Of each stream: (fetch, sample, where that sample begins), the oldest first."""
        self._fetches, self._lock, self._said = 0, Lock(), 0

    def resume(self, cursors: Mapping[int, str]) -> None:
        """Continue from `position`, whichever rank wrote it. Raises ValueError if it is not a position."""
        for number, text in cursors.items():
            sample, _, cursor = text.partition(" ")
            self._known[number] = [(0, int(sample), Cursor.parse(cursor))]
            self._said = max(self._said, self._known[number][0][2].epoch)

    def position(self, ends: np.ndarray) -> dict[int, str]:
        """Of each stream s that was read here, its sample ends[s] and where that begins; where that was not read up to,
        since samples were skipped, the nearest before it."""
        with self._lock:
            nearest = {
                number: max(before)
                for number, known in self._known.items()
                if (before := [one[1:] for one in known if 0 < one[1] <= ends[number]])
            }
        return {number: f"{sample} {cursor}" for number, (sample, cursor) in nearest.items()}

    def fetch(self, sample_indices: np.ndarray) -> np.ndarray:
        """Tokens [n, seq_length + 1] int32 of samples [n] int64 of this source.

        Raises UserError for documents that cannot be read.
        """
        windows = np.empty((len(sample_indices), self.seq_length + 1), np.int32)
        self._fetches += 1
        rejected = self.how.rejects.count
        for row in np.argsort(sample_indices, kind="stable").tolist():
            sample, number = divmod(int(sample_indices[row]), self.count)
            windows[row] = self._take(self._at(number, sample))
        if self.how.rejects.count > rejected == 0:
            self._say(f"data: left out, as others like it will be: {self.how.rejects.shown[0]}")
        return windows

    def sources(self, consumed_samples: int) -> dict[str, SourceProgress]:
        """How often the shares that are read here have been gone through, on average and read-ahead included; before
        any is, those that a resume knows."""
        opened = [stream.epochs for stream in list(self._open.values())]
        with self._lock:
            found = opened or [known[-1][2].epochs(self.shares[number]) for number, known in self._known.items()]
        return {"data": SourceProgress(consumed_samples, float(np.mean(found or 0.0)))}

    def _at(self, number: int, sample: int) -> LogicalStream:
        """A stream whose next window is the one asked for."""
        stream = self._open.get(number)
        if stream is None or stream.sample > sample:
            earlier = [one[1:] for one in self._known.get(number, []) if one[1] <= sample]
            nearest = max(earlier, default=(0, START))
            stream = self._open[number] = LogicalStream(self.shares[number], self.how, self.seq_length, *nearest)
        while stream.sample < sample:
            stream.next_window()
        return stream

    def _take(self, stream: LogicalStream) -> np.ndarray:
        window, cursor = stream.next_window(), stream.cursor
        with self._lock:
            known = self._known.setdefault(stream.share.number, [])
            known.append((self._fetches, stream.sample, cursor))
            # The newest one before those is kept too: a stream's turn may come seldom.
            while len(known) > 1 and known[1][0] < self._fetches - REMEMBERED:
                known.pop(0)
        if cursor.epoch > self._said:
            self._said = cursor.epoch
            which = f"stream {stream.share.number} of {self.count}{self.name and f' of {self.name}'}"
            self._say(f"data: {which} has gone through its share {cursor.epoch} time(s), and starts over")
        return window


class InterleavedStreams:
    """Samples of the train split of one streamed source or several, whose streams take turns (turns.py)."""

    def __init__(self, opened: Sequence[StreamedSource], names: Sequence[str], turns: Turns) -> None:
        self.opened, self.names, self.turns = opened, names, turns
        self.seq_length = opened[0].seq_length

    def resume(self, cursors: Sequence[Mapping[int, str]]) -> None:
        """Continue from the `position` of each source, whichever rank wrote it. Raises ValueError for another text."""
        for source, own in zip(self.opened, cursors, strict=True):
            source.resume(own)

    def position(self, consumed_samples: int) -> list[dict[int, str]]:
        """Of each source: where the sample of each stream that follows the first `consumed_samples` begins, of those
        known here."""
        ends = self.turns.ends(consumed_samples)
        return [source.position(own) for source, own in zip(self.opened, ends, strict=True)]

    def fetch(self, sample_indices: np.ndarray) -> np.ndarray:
        """Tokens [n, seq_length + 1] int32 of global sample indices [n] int64. Raises as StreamedSource.fetch."""
        windows = np.empty((len(sample_indices), self.seq_length + 1), np.int32)
        sources, streams, numbers = self.turns.assign(sample_indices)
        for source in np.unique(sources).tolist():
            chosen = np.flatnonzero(sources == source)
            windows[chosen] = self.opened[source].fetch(numbers[chosen] * self.turns.count + streams[chosen])
        return windows

    def sources(self, consumed_samples: int) -> dict[str, SourceProgress]:
        """How far each source has been read after the first `consumed_samples` samples, by its name."""
        counts = self.turns.ends(consumed_samples).sum(1).tolist()
        each = zip(self.names, self.opened, counts, strict=True)
        return {name: source.sources(count)["data"] for name, source, count in each}
