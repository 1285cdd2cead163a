"""The documents of one file in pieces, however long they are: for data.paths, which has no limit."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from data.raw import documents, units
from data.raw.input_file import InputSource, decoded, opened
from data.raw.reading import ReadOptions, Rejects

READ_BYTES = 1 << 20
WHOLE = 1 << 62
"""Bytes of a unit that no file fills."""


@dataclass(frozen=True, slots=True)
class DocumentPiece:
    """Part of a document."""

    text: str
    ends_document: bool
    source_bytes: int
    """Bytes of the file that this piece used up; for progress."""


def read(
    source: InputSource, jsonl_key: str, max_expansion: float, csv_column: str | None = None
) -> Iterator[DocumentPiece]:
    """Documents of a file: a line, a row, or the whole file of text.

    Raises UserError for what is not as expected, with its place.
    """
    reading = ReadOptions(
        jsonl_key=jsonl_key,
        csv_column=csv_column,
        on_bad_document="stop",
        max_document_bytes=sys.maxsize,
        max_expansion=max_expansion,
        flags="data.",
    )
    if source.kind == "text":
        yield from _text(source, reading)
        return
    for unit in units.divide([source], WHOLE) if source.size else ():
        for batch in documents.read(unit, reading, Rejects("stop", flags="")):
            used = batch.source_bytes
            for text in batch.texts:
                yield DocumentPiece(text, True, used)
                used = 0


def _text(source: InputSource, reading: ReadOptions) -> Iterator[DocumentPiece]:
    """One document, in pieces of about 1 MB cut at line ends.

    Pieces bound memory and keep encoding linear. A model that adds a leading blank to what it encodes adds
    one to each piece.
    """
    position = 0
    with opened(source, reading.max_expansion, reading.flags) as file:
        while lines := file.readlines(READ_BYTES):
            raw = b"".join(lines)
            yield DocumentPiece(decoded(raw, position, source.path), False, 0 if source.compression else len(raw))
            position += len(raw)
    yield DocumentPiece("", True, source.size if source.compression else 0)
