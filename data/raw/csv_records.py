"""Where the records of comma- and tab-separated values begin: quoted fields may hold line ends (RFC 4180)."""

import codecs
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from data.raw.input_file import InputSource, open_same

DELIMITERS = {"csv": ",", "tsv": "\t"}
SCAN_BYTES = 4 << 20
LINE_BYTES = 1 << 20
"""Read at a time of a record that goes on."""


class RecordScanner:
    """Finds the ends of records in bytes that come piece by piece, from the beginning of a record on.

    A quote opens a field only at the field's beginning, and two within it stand for one, as Python's `csv` reads.
    """

    def __init__(self, kind: str, at: int) -> None:
        """at: where in the file the first bytes are; what it begins with may be a byte order mark."""
        self._opens_after = (ord(DELIMITERS[kind]), ord("\n"))
        self._is_quoted = self._may_close = False
        self._may_be_mark = at == 0
        self._before = ord("\n")

    def ends(self, block: bytes) -> list[int]:
        """Of records that end in the next bytes: the position behind each one's line end."""
        found: list[int] = []
        for start, stop in self._unquoted(block):
            while (at := block.find(b"\n", start, stop)) >= 0:
                start = at + 1
                found.append(start)
        return found

    def _unquoted(self, block: bytes) -> Iterator[tuple[int, int]]:
        """Stretches outside of quotes."""
        at = start = 0
        if self._may_close and block:  # the quote that ended the piece before
            self._may_close = False
            if block.startswith(b'"'):
                at = 1
            else:
                self._is_quoted = False
        while (quote := block.find(b'"', at)) >= 0:
            at = quote + 1
            if not self._is_quoted:
                if (block[quote - 1] if quote else self._before) in self._opens_after or self._is_mark(block[:quote]):
                    self._is_quoted = True
                    yield start, quote
            elif at == len(block):
                self._may_close = True
            elif block[at] == ord('"'):
                at += 1
            else:
                self._is_quoted, start = False, at
        if block:
            self._before, self._may_be_mark = block[-1], False
        if not self._is_quoted:
            yield start, len(block)

    def _is_mark(self, before: bytes) -> bool:
        return self._may_be_mark and before == codecs.BOM_UTF8


class RecordBlock(NamedTuple):
    """Some whole records of a file."""

    offset: int
    size: int
    """Bytes read for it, those of a record that is too long included."""
    records: list[tuple[int, bytes]]
    """Where each begins, and its bytes with the line end."""
    too_long: int | None
    """Where a record begins that is longer than it may be; its bytes are skipped."""


def record_blocks(
    file: BinaryIO, kind: str, start: int, stop: int | None, block_bytes: int, most_bytes: int
) -> Iterator[RecordBlock]:
    """The records that begin in [start, stop), about `block_bytes` at a time; the file is at `start`, where one begins.

    What a block holds follows from where it begins alone. most_bytes: of one record.
    """
    while stop is None or start < stop:
        block = file.read(block_bytes if stop is None else min(block_bytes, stop - start))
        if not block:
            return
        scanner = RecordScanner(kind, start)
        ends, pieces, size = scanner.ends(block), [block], len(block)
        begun = ends[-1] if ends else 0
        while begun < size and (line := file.readline(LINE_BYTES)):
            ended = scanner.ends(line)
            size += len(line)
            if size - begun <= most_bytes:
                pieces.append(line)
            if ended:
                break
        too_long = start + begun if size - begun > most_bytes else None
        if begun < size and too_long is None:
            ends.append(size)
        whole = b"".join(pieces)
        begins = [0, *ends]
        yield RecordBlock(
            start, size, [(start + at, whole[at:end]) for at, end in zip(begins, ends, strict=False)], too_long
        )
        start += size


def cuts(source: InputSource, every: int) -> list[int]:
    """Where the first record begins behind each multiple of `every` bytes of a file, which is read for that.

    A line may be within a field, and only what comes before tells. Raises UserError for another file than was found.
    """
    found: list[int] = []
    scanner, offset, wanted = RecordScanner(source.kind, 0), 0, every
    with open_same(source) as file:
        while wanted < source.size and (block := file.read(SCAN_BYTES)):
            for end in scanner.ends(block):
                if offset + end >= wanted and offset + end < source.size:
                    found.append(offset + end)
                    wanted = (offset + end) // every * every + every
            offset += len(block)
    return found
