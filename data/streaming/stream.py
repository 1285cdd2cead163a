"""One logical stream: documents of its share, tokenised and packed into windows, from any position on."""

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xxhash

from data.config import split_weights
from data.order import permute
from data.raw.documents import read
from data.raw.reading import DocumentOffset, ReadOptions, Rejects
from data.split import SPLITS, SplitName
from data.streaming.dealing import Share, UnitShare
from data.tokenizers.engines import Engine
from program.errors import UserError

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
    """Number in the document, or behind its end among those of the documents that follow."""
    mixed: int = 0
    """With data.stream_shuffle: the document is this one of the mixed group that begins at the place above."""

    def __str__(self) -> str:
        return " ".join(map(str, self))

    def epochs(self, share: Share) -> float:
        """How often a share has been gone through, piece by piece."""
        return self.epoch + self.piece / len(share.pieces)

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
    shuffle: int = 0
    """Documents of a group that is mixed; 0: they come as they stand."""

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
        self._documents = mixed(share, how, cursor)
        self._held: deque[tuple[Cursor, np.ndarray]] = deque()
        self._begin, self._used = cursor, cursor.token

    @property
    def cursor(self) -> Cursor:
        """Where the next window begins."""
        return self._held[0][0]._replace(token=self._used) if self._held else self._begin

    @property
    def epochs(self) -> float:
        """How often the share has been gone through."""
        return self.cursor.epochs(self.share)

    def next_window(self) -> np.ndarray:
        """The next window: [seq_length + 1] int32.

        Raises UserError where a share is smaller than a window, and what reading documents raises.
        """
        window = np.empty(self.seq_length + 1, np.int32)
        filled = index = 0
        while not self._held:  # behind the end of the document that the cursor names
            self._held.append(next(self._documents))
            self._pass_over(0)
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
        while self._held and self._used >= len(self._held[0][1]):
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


def mixed(share: Share, how: Tokenising, start: Cursor) -> Iterator[tuple[Cursor, np.ndarray]]:
    """`documents`, of which each `how.shuffle` of an epoch that follow one another come in an order from the seed.

    A cursor is where such a group begins and how many of it came before, so that a resume tokenises one group again
    and no checkpoint holds documents. The order is a matter of the group's place alone, not of how batches are cut.
    """
    if not how.shuffle:
        yield from documents(share, how, start)
        return
    first = start.mixed
    for epoch, own in itertools.groupby(documents(share, how, start), key=lambda one: one[0].epoch):
        for group in itertools.batched(own, how.shuffle):
            begin = group[0][0]
            place = f"{share.seed} {share.number} {epoch} {begin.piece} {begin.before + begin.document}"
            order = permute(np.arange(len(group)), len(group), f"triplane documents {place}").tolist()
            for number in range(first, len(group)):
                yield begin._replace(mixed=number), group[order[number]][1]
            first = 0
            del group  # before the next one is read: a stream has one in memory


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
