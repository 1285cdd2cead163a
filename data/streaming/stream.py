"""One logical stream: documents of its share, tokenised and packed into windows, from any position on.

Each stream reads a fixed share of the units, the same for any number of ranks.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xxhash

from data.config import MOST_STREAMS, split_weights
from data.order import permute
from data.raw.documents import read
from data.raw.reading import DocumentOffset, ReadOptions, Rejects
from data.raw.units import Unit
from data.split import SPLITS, SplitName
from data.tokenizers.engines import Engine
from program.errors import UserError

UNITS_PER_STREAM = 256
"""Units that files are cut into for each stream: what is read in another order each epoch, and shared out evenly."""
SMALLEST_UNIT_BYTES = 64 << 10
DATASET_STEP_BYTES = 32 << 20
"""What a step of a dataset is taken for, which does not say how large it is."""
HELD_OUT_BYTES, HELD_OUT_BYTES_PER_TOKEN = 1 << 20, 256
"""Bytes that a stream is to have of a split that is not trained on: for some documents, and for about 64 samples."""


@dataclass(frozen=True, slots=True)
class UnitShare:
    """The documents of a unit whose number in it is `take` modulo `of`."""

    unit: Unit
    take: int
    of: int

    @property
    def size(self) -> float:
        """Its part of the unit's bytes on disk; never 0."""
        return max(1, self.unit.size) / self.of


@dataclass(frozen=True, slots=True)
class Share:
    """What one stream reads, once each epoch."""

    number: int
    pieces: tuple[UnitShare, ...]
    seed: int | str

    @property
    def size(self) -> float:
        """Bytes on disk."""
        return sum(piece.size for piece in self.pieces)

    def order(self, epoch: int) -> list[int]:
        """Numbers of the pieces in the order of an epoch."""
        numbers = np.arange(len(self.pieces))
        return permute(numbers, len(self.pieces), f"triplane stream {self.seed} {self.number} {epoch}").tolist()


def unit_bytes(total_bytes: int, count: int) -> int:
    """Size to cut files at, for `count` streams."""
    return max(total_bytes // (UNITS_PER_STREAM * count), SMALLEST_UNIT_BYTES)


def deal(units: Sequence[Unit], count: int, seed: int | str) -> list[Share]:
    """Shares of about the same size for `count` streams: the largest piece first, always to the smallest share.

    A unit that is larger than a share and cannot be cut, as a compressed file, is divided by document: every stream
    that has part of it reads, but does not tokenise, the whole. The sizes of shares do not depend on the seed.
    Raises UserError where there are fewer pieces than streams.
    """
    pieces = list(_pieces(units, count))
    if len(pieces) < count:
        raise UserError(
            f"data.stream_count = {count}: data.stream can be divided into {len(pieces)} parts only (a text file is "
            f"one document). Set data.stream_count to {len(pieces)} or less, or name more files."
        )
    mixed = permute(np.arange(len(pieces)), len(pieces), f"triplane shares {seed}").tolist()
    smallest = [(0.0, number) for number in range(count)]
    held: list[list[UnitShare]] = [[] for _ in range(count)]
    for piece in sorted((pieces[index] for index in mixed), key=lambda piece: -piece.size):
        size, number = smallest[0]
        heapq.heapreplace(smallest, (size + piece.size, number))
        held[number].append(piece)
    return [Share(number, tuple(own), seed) for number, own in enumerate(held)]


def held_out_count(units: Sequence[Unit], count: int, part: float, seq_length: int) -> int:
    """How many streams a split that is not trained on is dealt to: `count`, or fewer so that each has enough of it.

    part: of all documents. Evaluations are short, so that streams which several ranks read cost little.
    """
    size = sum(DATASET_STEP_BYTES if one.source.kind == "dataset" else one.size for unit in units for one in unit.parts)
    return max(1, min(count, int(size * part) // max(HELD_OUT_BYTES, HELD_OUT_BYTES_PER_TOKEN * seq_length)))


def _pieces(units: Sequence[Unit], count: int) -> list[UnitShare]:
    """At least `count`, where that can be: one a unit, and more of those that are larger than a share."""
    sizes = [max(1, unit.size) for unit in units]
    most = [_most_pieces(unit) for unit in units]
    total = sum(sizes)
    of = [min(most[index], max(1, size * count // total)) for index, size in enumerate(sizes)]
    largest = [(-sizes[index] / of[index], index) for index in range(len(units)) if of[index] < most[index]]
    heapq.heapify(largest)
    for _ in range(count - sum(of)):
        if not largest:
            break
        index = largest[0][1]
        of[index] += 1
        if of[index] < most[index]:
            heapq.heapreplace(largest, (-sizes[index] / of[index], index))
        else:
            heapq.heappop(largest)
    return [UnitShare(unit, take, parts) for unit, parts in zip(units, of, strict=True) for take in range(parts)]


def _most_pieces(unit: Unit) -> int:
    """Into how many pieces a unit can be divided: a text file is one document."""
    only_texts = all(part.source.kind == "text" for part in unit.parts)
    return len(unit.parts) if only_texts else MOST_STREAMS


GROUP = 16
"""Documents tokenised together: few, so that no stream keeps the others waiting."""


class Cursor(NamedTuple):
    """Where a token stands in a stream; any rank can continue reading from it."""

    epoch: int = 0
    piece: int = 0
    """Position in the epoch's order of pieces."""
    part: int = 0
    at: int = 0
    """Where in the part a batch of documents begins (data/raw/documents.py)."""
    before: int = 0
    """Documents of the unit before that batch."""
    document: int = 0
    """Number in the batch."""
    token: int = 0
    """Number in the document."""

    def __str__(self) -> str:
        return " ".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> "Cursor":
        """What ``str`` gave. Raises ValueError or TypeError for anything else."""
        return cls(*map(int, text.split()))


START = Cursor()


def part_of(split: SplitName, weights: str) -> tuple[float, float]:
    """What a split has of [0, 1). weights: data.split. Raises UserError where that is nothing."""
    found = split_weights(weights)
    number = SPLITS.index(split)
    low, high = (sum(found[:end]) / sum(found) for end in (number, number + 1))
    if low == high:
        raise UserError(f'data.split = "{weights}" leaves nothing of data.stream for the {split} split.')
    return low, high


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenising:
    """How documents become tokens, and which are wanted."""

    reading: ReadOptions
    engine: Engine
    eod: int
    """Ends every document."""
    split: SplitName
    part: tuple[float, float]
    """What the split has of [0, 1)."""
    rejects: Rejects

    def wants(self, text: str) -> bool:
        """Whether a document belongs to the split: by a hash of its text, so that one seen twice is never in two."""
        low, high = self.part
        return high - low == 1 or low <= xxhash.xxh3_64_intdigest(text.encode()) / 2**64 < high

    def encode(self, texts: list[str]) -> Iterator[np.ndarray]:
        """Ids [n + 1] int32 of each text, with what ends it; [0] for one without ids."""
        ids, lengths = self.engine.encode_batch(texts)
        for end, length in zip(np.cumsum(lengths).tolist(), lengths.tolist(), strict=True):
            ended = np.full(length + 1, self.eod, np.int32)
            ended[:-1] = ids[end - length : end]
            yield ended if length else ended[:0]


class LogicalStream:
    """Windows of `seq_length` + 1 tokens, `seq_length` apart, over the documents of a share; endless.

    Epochs follow one another without a gap, so that no token is left out.
    """

    def __init__(self, share: Share, how: Tokenising, seq_length: int, sample: int = 0, cursor: Cursor = START) -> None:
        """sample: number of the next window, which begins at `cursor`."""
        self.share, self.how, self.seq_length, self.sample = share, how, seq_length, sample
        self._documents = documents(share, how, cursor)
        self._held: deque[tuple[Cursor, np.ndarray]] = deque()
        self._begin, self._used = cursor, cursor.token

    @property
    def cursor(self) -> Cursor:
        """Where the next window begins."""
        return self._held[0][0]._replace(token=self._used) if self._held else self._begin

    @property
    def epochs(self) -> float:
        """How often the share has been gone through, piece by piece."""
        here = self.cursor
        return here.epoch + here.piece / len(self.share.pieces)

    def next_window(self) -> np.ndarray:
        """The next window: [seq_length + 1] int32.

        Raises UserError where a share is smaller than a window, and what reading documents raises.
        """
        window = np.empty(self.seq_length + 1, np.int32)
        filled = index = 0
        while filled < len(window):
            if index == len(self._held):
                self._held.append(next(self._documents))
                self._check_size()
            start = self._used if index == 0 else 0
            tokens = self._held[index][1][start : start + len(window) - filled]
            window[filled : filled + len(tokens)] = tokens
            filled, index = filled + len(tokens), index + 1
        self._pass_over(self.seq_length)
        self.sample += 1
        return window

    def _pass_over(self, tokens: int) -> None:
        self._used += tokens
        while self._used >= len(self._held[0][1]):
            self._used -= len(self._held[0][1])
            self._held.popleft()

    def _check_size(self) -> None:
        """A window that held the same text twice would train on it at once, and silently."""
        if self._held[-1][0].epoch - self._held[0][0].epoch > 1:
            raise too_small(self.share, self.how, f"fewer than model.seq_length + 1 = {self.seq_length + 1} tokens")


def too_small(share: Share, how: Tokenising, held: str) -> UserError:
    """What is wrong with a stream that cannot give a sample."""
    paths = dict.fromkeys(part.source.path for piece in share.pieces for part in piece.unit.parts)
    return UserError(
        f"data.stream: stream {share.number} holds {held} of the {how.split} split (of {', '.join(list(paths)[:3])}). "
        "Lower data.stream_count, change data.split, or give more documents."
    )


def documents(share: Share, how: Tokenising, start: Cursor) -> Iterator[tuple[Cursor, np.ndarray]]:
    """Documents with text from the one at `start` on: where each begins, and its ids [n] int32 with what ends it.

    Raises UserError where an epoch has none.
    """
    first = start.piece
    for epoch in itertools.count(start.epoch):
        found = first > 0  # the rest of an epoch may hold nothing
        order = share.order(epoch)
        for number in range(first, len(order)):
            here = start if (epoch, number) == start[:2] else Cursor(epoch, number)
            for one in _piece(share.pieces[order[number]], how, here):
                found = True
                yield one
        if not found:
            raise too_small(share, how, "no document with text")
        first = 0


def _piece(piece: UnitShare, how: Tokenising, start: Cursor) -> Iterator[tuple[Cursor, np.ndarray]]:
    before, first = start.before, start.document
    for batch in read(piece.unit, how.reading, how.rejects, DocumentOffset(start.part, start.at)):
        here = Cursor(start.epoch, start.piece, *batch.place, before)
        own = range(first + (piece.take - before - first) % piece.of, len(batch.texts), piece.of)
        wanted = (number for number in own if how.wants(batch.texts[number]))
        for group in itertools.batched(wanted, GROUP):
            ids = how.encode([batch.texts[number] for number in group])
            for number, tokens in zip(group, ids, strict=True):
                if len(tokens):
                    yield here._replace(document=number), tokens
        before, first = before + len(batch.texts), 0
