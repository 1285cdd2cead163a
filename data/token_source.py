"""Windows of the token stream of one source, by global sample index."""

import contextlib
from dataclasses import dataclass

import numpy as np

from data import order
from data.block_cache import BlockTokens
from data.prepared import SourceProgress
from data.shards import Shard, bin_path
from program.errors import UserError

BLOCK = 4096
"""Samples whose windows are computed together."""
UNSIGNED = {4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True)
class SplitSegment:
    """The tokens that one shard gives to a split: positions `start` to `stop` of its stream."""

    shard: Shard
    start: int
    stop: int


class TokenSource:
    """Windows of `seq_length` + 1 tokens, `seq_length` apart, over the concatenated segments.

    Which window a sample is follows from the seed and its global index alone (data/order.py). Samples run
    over document ends, which the tokenizer's `eod` marks; at most `seq_length` tokens at the end are left
    out.
    """

    def __init__(
        self, segments: list[SplitSegment], seq_length: int, seed: int | str, vocab_size: int, shift: int = 0
    ) -> None:
        """shift: number, among the source's own samples, of global sample 0; below 0 where a later one is the first."""
        self.shift = shift
        self.segments = [segment for segment in segments if segment.stop > segment.start]
        self.seq_length = seq_length
        self.seed = seed
        self.vocab_size = vocab_size
        sizes = [segment.stop - segment.start for segment in self.segments]
        self._ends = np.cumsum(sizes, dtype=np.int64)
        self._shifts = np.array([segment.stop for segment in self.segments], np.int64) - self._ends
        self.token_count = int(self._ends[-1])
        self.samples_per_epoch = (self.token_count - 1) // seq_length
        widest = max(segment.shard.dtype.itemsize for segment in self.segments)
        self._dtype = np.int32 if widest <= 4 else np.int64  # ids beyond int32 must be seen before they wrap
        self._blocks: dict[int, np.ndarray] = {}
        caches = (segment.shard.cache for segment in self.segments)
        self._cache = next(filter(None, caches), None)
        """What is read through of shards in buckets; None where there are none."""

    def fetch(self, sample_indices: np.ndarray) -> np.ndarray:
        """Tokens [n, seq_length + 1] int32 of global sample indices [n] int64.

        Raises UserError for an id outside the vocabulary: every id is checked each time, which costs a few
        microseconds a sample where a wrong one would train on garbage or fault on a GPU.
        """
        return self.read_windows(self._windows(sample_indices + self.shift), sample_indices)

    def read_windows(self, windows: np.ndarray, sample_indices: np.ndarray) -> np.ndarray:
        """Tokens [n, seq_length + 1] int32 of windows [n] int64, which the samples are. Raises as `fetch`."""
        samples = np.empty((len(windows), self.seq_length + 1), self._dtype)
        positions = windows * self.seq_length
        numbers = np.searchsorted(self._ends, positions, side="right")
        starts = positions + self._shifts[numbers]
        with self._cache or contextlib.nullcontext():
            if self._cache is not None:
                self._have(numbers, starts)
            rows = zip(samples, positions.tolist(), numbers.tolist(), starts.tolist(), strict=True)
            for sample, position, number, start in rows:
                segment = self.segments[number]
                if start + len(sample) <= segment.stop:
                    sample[:] = segment.shard.array[start : start + len(sample)]
                else:
                    self._read(position, sample)
        return self._checked(samples, windows, sample_indices)

    def _have(self, numbers: np.ndarray, starts: np.ndarray) -> None:
        """Windows that begin at ``starts`` [n] of segments ``numbers`` [n], of shards in buckets."""
        is_one = len(self.segments) == 1
        for number in (0,) if is_one else set(numbers.tolist()):
            if isinstance(tokens := self.segments[number].shard.tokens, BlockTokens):
                tokens.have(starts if is_one else starts[numbers == number], self.seq_length + 1)

    def ask_for(self, sample_indices: np.ndarray) -> None:
        """Have what samples [n] are made of fetched, of shards in a bucket. Returns at once."""
        if self._cache is None:
            return
        for window in self._windows(sample_indices + self.shift).tolist():
            for position, length in self._spans(window):
                segment, start = self._locate(position)
                if isinstance(segment.shard.tokens, BlockTokens):
                    segment.shard.tokens.ask_for(start, min(start + length, segment.stop))

    def _spans(self, window: int) -> list[tuple[int, int]]:
        """Where in the stream a window's tokens lie: (position, tokens)."""
        return [(window * self.seq_length, self.seq_length + 1)]

    def read_rest(self) -> np.ndarray:
        """Tokens [n] int32 from the last window's last one on, n at most seq_length: what no window predicts."""
        after = np.array([self.samples_per_epoch])
        rest = np.empty((1, self.token_count - self.samples_per_epoch * self.seq_length), self._dtype)
        self._read(self.samples_per_epoch * self.seq_length, rest[0])
        return self._checked(rest, after, after)[0]

    def _checked(self, samples: np.ndarray, windows: np.ndarray, sample_indices: np.ndarray) -> np.ndarray:
        # As unsigned numbers, negative ids are beyond any vocabulary: one pass instead of two.
        if samples.size and int(samples.view(UNSIGNED[samples.itemsize]).max()) >= self.vocab_size:
            raise UserError(self._beyond_vocabulary(samples, windows, sample_indices))
        return samples.astype(np.int32, copy=False)

    def sources(self, consumed_samples: int) -> dict[str, SourceProgress]:
        """How often the windows have been gone through after the first `consumed_samples` samples."""
        read = consumed_samples + self.shift
        return {"data": SourceProgress(read, read / self.samples_per_epoch)}

    def _windows(self, sample_indices: np.ndarray) -> np.ndarray:
        """Window numbers [n] int64. The permutation costs as much for one position as for hundreds, so that small
        requests are served from blocks of positions, of which the last two are kept.
        """
        if len(sample_indices) >= BLOCK // 4:
            return order.sample_windows(sample_indices, self.samples_per_epoch, self.seed)
        blocks, positions = np.divmod(sample_indices, BLOCK)
        windows = np.empty(len(sample_indices), np.int64)
        for block in np.unique(blocks).tolist():
            chosen = blocks == block
            windows[chosen] = self._block(block)[positions[chosen]]
        return windows

    def _block(self, block: int) -> np.ndarray:
        if block not in self._blocks:
            indices = np.arange(block * BLOCK, (block + 1) * BLOCK)
            if len(self._blocks) > 1:
                self._blocks.pop(next(iter(self._blocks)))
            self._blocks[block] = order.sample_windows(indices, self.samples_per_epoch, self.seed)
        return self._blocks[block]

    def _read(self, position: int, sample: np.ndarray) -> None:
        """Fill `sample` from the stream at `position`, crossing segments as needed."""
        filled = 0
        while filled < len(sample):
            segment, start = self._locate(position + filled)
            tokens = segment.shard.tokens[start : min(segment.stop, start + len(sample) - filled)]
            sample[filled : filled + len(tokens)] = tokens
            filled += len(tokens)

    def _position(self, window: int, column: int) -> int:
        """Of a window's token in the stream."""
        for start, length in self._spans(window):
            if column < length:
                return start + column
            column -= length
        raise IndexError(column)

    def _locate(self, position: int) -> tuple[SplitSegment, int]:
        """The segment of a stream position, and the position in its shard."""
        number = int(np.searchsorted(self._ends, position, side="right"))
        return self.segments[number], position + int(self._shifts[number])

    def _beyond_vocabulary(self, samples: np.ndarray, windows: np.ndarray, sample_indices: np.ndarray) -> str:
        row, column = np.argwhere((samples < 0) | (samples >= self.vocab_size))[0].tolist()
        segment, position = self._locate(self._position(int(windows[row]), column))
        # prepare() has compared the tokenizer with what every manifest says.
        if segment.shard.manifest is not None:
            way = (
                f"Its manifest says that data.tokenizer made it, so it is damaged: `python -m tools.preprocess verify "
                f"{segment.shard.prefix}` names where. Copy it or tokenise the text again."
            )
        else:
            way = "Set data.tokenizer to the one that the file was made with, or tokenise the text again."
        return (
            f"data: {bin_path(segment.shard.prefix)} holds token id {samples[row, column]} at token "
            f"{position} (sample {sample_indices[row]}); the vocabulary has {self.vocab_size} ids. {way}"
        )
