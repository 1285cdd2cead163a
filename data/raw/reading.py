"""How documents are read, whatever their format: options, batches, and what becomes of bad ones."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Literal, NamedTuple

from data.raw.compressed import Unpacked
from data.raw.fields import names_in
from data.raw.input_file import opened
from data.raw.units import SourcePart
from program.errors import UserError, printable

BATCH_BYTES, BATCH_ROWS = 4 << 20, 1000
SHOWN = 3
"""Rejected documents that a unit describes; the others are counted."""


class DocumentOffset(NamedTuple):
    """Where in a unit a batch begins."""

    part: int = 0
    at: int = 0
    """Byte of the file, byte of what it unpacks to, or row."""


BEGIN = DocumentOffset()


class DocumentBatch(NamedTuple):
    """Some documents, and how far reading went on by them."""

    texts: list[str]
    source_bytes: int
    """On disk; of a dataset, which does not say how large it is, the bytes of these texts."""
    place: DocumentOffset = BEGIN
    positions: Sequence[int] = ()
    """Of each text: byte where its line begins, or row; see `where`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How documents are read."""

    jsonl_key: str
    """The field or column that holds a document; `doc.text` is the field `text` of `doc`."""
    csv_column: str | None = None
    """The column of a csv or tsv file; None: `jsonl_key`."""
    on_bad_document: Literal["stop", "skip"]
    max_document_bytes: int
    max_expansion: float
    batch_bytes: int = BATCH_BYTES
    """Of a file of lines, taken at a time."""
    flags: str = "--"
    """What stands before these names where a user sets them, for messages."""

    @property
    def column(self) -> str:
        """Of a csv or tsv file."""
        return self.csv_column or self.jsonl_key


@dataclass(slots=True)
class Rejects:
    """Documents that cannot be used: the first is an error, or they are counted."""

    policy: Literal["stop", "skip"]
    flags: str = "--"
    """What stands before on_bad_document where a user sets it; nothing where it cannot be set."""
    count: int = 0
    shown: list[str] = field(default_factory=list)

    def reject(self, describe: Callable[[], str]) -> None:
        """Raises UserError where one bad document is to stop the work. describe: place and reason."""
        self.count += 1
        if self.policy == "stop":
            way = f" {self.flags}on_bad_document skip leaves such documents out and counts them." if self.flags else ""
            raise UserError(f"{printable(describe())}{way}")
        if len(self.shown) < SHOWN:
            self.shown.append(printable(describe()))

    def taken(self, found: tuple[str | None, str], place: Callable[[], str]) -> str | None:
        """A document, as ``checked`` gives it; None where it is none, which is rejected. Raises as ``reject``."""
        text, reason = found
        if text is None:
            self.reject(lambda: f"{place()}: {reason}")
        return text


def checked(value: Any, name: str, reading: ReadOptions) -> tuple[str | None, str]:
    """What a field holds, where it is a document; or None, and why it is none."""
    if value is None:
        return None, f"{name} is null, expected text."
    if isinstance(value, dict):
        return None, f"{name} holds further fields, expected text; found in it: {names_in(value)}."
    if isinstance(value, bytes):  # a binary column, or one of text that is no UTF-8
        try:
            value = value.decode()
        except UnicodeDecodeError as error:
            return None, f"byte {error.start} of {name} is not UTF-8 text."
    if not isinstance(value, str):
        return None, f"{name} is a {type(value).__name__}, expected text."
    try:
        size = len(value) if value.isascii() else len(value.encode())
    except UnicodeEncodeError as error:
        return None, f"character {error.start} of {name} is half a surrogate pair, which is no text."
    return (None, too_long(reading)) if size > reading.max_document_bytes else (value, "")


def too_long(reading: ReadOptions) -> str:
    """Why a document is none."""
    limit = f"{reading.max_document_bytes / 1e6:g} MB"
    return f"a document of more than {limit}; raise {reading.flags}max_document_mb if it is right."


def line_place(part: SourcePart, offset: int, reading: ReadOptions) -> str:
    """`FILE:LINE (byte OFFSET)`; of a compressed file, in what it unpacks to. Reads the file up to there."""
    number, left = 1, offset
    with opened(part.source, reading.max_expansion, reading.flags) as file:
        while left and (block := file.read(min(left, 1 << 20))):
            number += block.count(b"\n")
            left -= len(block)
    unpacked = " unpacked" if part.source.compression else ""
    return f"{part.source.path}:{number} (byte {offset}{unpacked})"


def go_to(file: io.BufferedReader, start: int) -> int:
    """Go to the first line that begins at `start` or later: where that is."""
    if not start:
        return 0
    if not isinstance(file.raw, Unpacked):
        file.seek(start - 1)
        return start - 1 + skip_line(file)
    left = start  # only ever the beginning of a line
    while left and (block := file.read(min(left, 1 << 20))):
        left -= len(block)
    return start


def skip_line(file: BinaryIO) -> int:
    """Read to the end of the line: the bytes that were left of it."""
    skipped = 0
    while piece := file.readline(1 << 20):
        skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return skipped
