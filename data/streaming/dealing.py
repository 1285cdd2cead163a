"""Shares: which documents each logical stream reads, the same for any number of ranks."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data.config import MOST_STREAMS
from data.order import permute
from data.raw.units import Unit
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
            f"data.stream_count = {count}: the source of {units[0].parts[0].source.path} can be divided into "
            f"{len(pieces)} parts only (a text file is one document). Set data.stream_count to {len(pieces)} or less, "
            "or name more files."
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
