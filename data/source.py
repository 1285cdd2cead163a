"""Samples of one split: windows of the token stream, fetched by global sample index."""

from dataclasses import dataclass

import numpy as np

from data import order
from data.config import DataConfig
from data.prepare import Prepared
from data.shards import Shard, bin_path
from data.split import SplitName, split_documents
from parallel.errors import UserError


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens that one shard gives to a split: positions `start` to `stop` of its stream."""

    shard: Shard
    start: int
    stop: int


def build_source(prepared: Prepared, config: DataConfig, seq_length: int, seed: int, split: SplitName) -> "TokenSource":
    """Open a split. Every shard is split by document on its own, as Megatron does.

    Raises UserError where the split cannot fill one sample.
    """
    segments, document_count = [], 0
    for shard in map(Shard, prepared.prefixes):
        documents = split_documents(shard.document_count, config.split)[split]
        document_count += len(documents)
        bounds = shard.document_start(documents.start), shard.document_start(documents.stop)
        segments.append(Segment(shard, *bounds))
    token_count = sum(segment.stop - segment.start for segment in segments)
    if token_count < seq_length + 1:
        raise UserError(
            f"data: the {split} split holds {token_count} tokens in {document_count} document(s); one sample "
            f"needs seq_length + 1 = {seq_length + 1}. Give more documents (a .jsonl has one a line, another "
            f'file is one), change data.split = "{config.split}", or lower model.seq_length.'
        )
    return TokenSource(segments, seq_length, seed, prepared.tokenizer.vocab_size)


class TokenSource:
    """Windows of `seq_length` + 1 tokens, `seq_length` apart, over the concatenated segments.

    Which window a sample is follows from the seed and its global index alone (data/order.py). Samples run
    over document ends, which the tokenizer's `eod` marks; at most `seq_length` tokens at the end are left
    out.
    """

    def __init__(self, segments: list[Segment], seq_length: int, seed: int, vocab_size: int) -> None:
        self.segments = [segment for segment in segments if segment.stop > segment.start]
        self.seq_length = seq_length
        self.seed = seed
        self.vocab_size = vocab_size
        sizes = [segment.stop - segment.start for segment in self.segments]
        self._ends = np.cumsum(sizes, dtype=np.int64)
        self.token_count = int(self._ends[-1])
        self.samples_per_epoch = (self.token_count - 1) // seq_length
        widest = max(segment.shard.dtype.itemsize for segment in self.segments)
        self._dtype = np.int32 if widest <= 4 else np.int64  # ids beyond int32 must be seen before they wrap

    def fetch(self, sample_indices: np.ndarray) -> np.ndarray:
        """Tokens [n, seq_length + 1] int32 of global sample indices [n] int64.

        Raises UserError for an id outside the vocabulary: every id is checked each time, which costs a few
        microseconds a sample where a wrong one would train on garbage or fault on a GPU.
        """
        windows = order.sample_windows(sample_indices, self.samples_per_epoch, self.seed)
        samples = np.empty((len(windows), self.seq_length + 1), self._dtype)
        for window, sample in zip(windows.tolist(), samples, strict=True):
            self._read(window * self.seq_length, sample)
        if samples.size and (int(samples.min()) < 0 or int(samples.max()) >= self.vocab_size):
            raise UserError(self._beyond_vocabulary(samples, windows, sample_indices))
        return samples.astype(np.int32, copy=False)

    def _read(self, position: int, sample: np.ndarray) -> None:
        """Fill `sample` from the stream at `position`, crossing segments as needed."""
        filled = 0
        while filled < len(sample):
            segment, start = self._locate(position + filled)
            tokens = segment.shard.tokens[start : min(segment.stop, start + len(sample) - filled)]
            sample[filled : filled + len(tokens)] = tokens
            filled += len(tokens)

    def _locate(self, position: int) -> tuple[Segment, int]:
        """The segment of a stream position, and the position in its shard."""
        number = int(np.searchsorted(self._ends, position, side="right"))
        segment = self.segments[number]
        return segment, segment.stop - (int(self._ends[number]) - position)

    def _beyond_vocabulary(self, samples: np.ndarray, windows: np.ndarray, sample_indices: np.ndarray) -> str:
        row, column = np.argwhere((samples < 0) | (samples >= self.vocab_size))[0].tolist()
        segment, position = self._locate(int(windows[row]) * self.seq_length + column)
        return (
            f"data: {bin_path(segment.shard.prefix)} holds token id {samples[row, column]} at token "
            f"{position} (sample {sample_indices[row]}); the vocabulary has {self.vocab_size} ids. "
            "Set data.tokenizer to the one that the file was made with, or tokenise the text again."
        )
