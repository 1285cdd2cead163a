"""Samples of all logical streams, fetched by global sample index."""

from collections.abc import Mapping
from threading import Lock

import numpy as np

from data.prepared import SourceProgress
from data.raw.reading import Rejects
from data.split import SplitName
from data.streaming.opening import Streams
from data.streaming.stream import START, Cursor, LogicalStream, Tokenising, deal, held_out_count, part_of

REMEMBERED = 8
"""Fetches whose positions are kept: a reader is that far ahead of what has been trained on at most."""


class StreamedSource:
    """Global sample i is window i div S of stream i mod S, of S streams; a stream is opened when it is asked for.

    Fetching is quick for samples that follow the ones before, stream by stream; what lies between is tokenised and
    skipped. One thread fetches; another may ask for the position.
    """

    def __init__(
        self, streams: Streams, split: SplitName, weights: str, seq_length: int, seed: int, shift: int = 0
    ) -> None:
        """weights: data.split. shift: number of global sample 0 among the streams' own.

        Raises UserError where it leaves the split nothing, or there are too many streams.
        """
        self.shift = shift
        self.seq_length, reading, part = seq_length, streams.reading, part_of(split, weights)
        self.count = streams.count
        if split != "train":
            self.count = held_out_count(streams.units, streams.count, part[1] - part[0], seq_length)
        self.how = Tokenising(
            reading=reading,
            engine=streams.engine,
            eod=streams.eod,
            split=split,
            part=part,
            rejects=Rejects(reading.on_bad_document, reading.flags),
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

    def position(self, samples: int) -> dict[int, tuple[int, Cursor]]:
        """Of each stream that was read here the sample of its own, and where it begins, that follows the first
        `samples` global ones; where that was not read up to, since samples were skipped, the nearest before it."""
        end = samples + self.shift
        with self._lock:
            return {
                number: max(before)
                for number, known in self._known.items()
                if (before := [one[1:] for one in known if 0 < one[1] <= -((number - end) // self.count)])
            }

    def fetch(self, sample_indices: np.ndarray) -> np.ndarray:
        """Tokens [n, seq_length + 1] int32 of global sample indices [n] int64.

        Raises UserError for documents that cannot be read.
        """
        windows = np.empty((len(sample_indices), self.seq_length + 1), np.int32)
        self._fetches += 1
        rejected = self.how.rejects.count
        for row in np.argsort(sample_indices, kind="stable").tolist():
            sample, number = divmod(int(sample_indices[row]) + self.shift, self.count)
            windows[row] = self._take(self._at(number, sample))
        if self.how.rejects.count > rejected == 0:
            self._say(f"data: left out, as others like it will be: {self.how.rejects.shown[0]}")
        return windows

    def sources(self, consumed_samples: int) -> dict[str, SourceProgress]:
        """How often the shares that are read here have been gone through, on average and read-ahead included."""
        opened = [stream.epochs for stream in list(self._open.values())]
        return {"data": SourceProgress(consumed_samples + self.shift, float(np.mean(opened)))} if opened else {}

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
            which = f"stream {stream.share.number} of {self.count}"
            self._say(f"data: {which} has gone through its share {cursor.epoch} time(s), and starts over")
        return window
