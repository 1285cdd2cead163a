"""The documents of comma- and tab-separated values: a column of each record, by the names in the header."""

import codecs
import csv
import sys
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from data.raw.compressed import Unpacked
from data.raw.csv_records import DELIMITERS, record_blocks
from data.raw.input_file import opened
from data.raw.reading import DocumentBatch, DocumentOffset, ReadOptions, Rejects, checked, go_to, line_place, too_long
from data.raw.units import SourcePart
from program.errors import UserError
from program.schema import shown

_WITH_COMMAS = "python -c \"import csv, sys; csv.writer(sys.stdout).writerows(csv.reader(sys.stdin, delimiter=';'))\""
HEAD_BYTES, HEADER_BYTES = 64 << 10, 1 << 20
"""Read at a time for the header; what it may have."""


class Header(NamedTuple):
    """What the first record says."""

    end: int
    """Where the records behind it begin."""
    column: int
    """Number of the one that holds the document."""
    columns: int
    """How many there are."""


def read_csv(part: SourcePart, at: int, reading: ReadOptions, rejects: Rejects) -> Iterator[DocumentBatch]:
    """The records that begin within the part."""
    csv.field_size_limit(sys.maxsize)  # a setting of the process; max_document_bytes is the limit
    header = _header(part, reading)
    if header is None:
        return
    with opened(part.source, reading.max_expansion, reading.flags) as file:
        packed = file.raw if isinstance(file.raw, Unpacked) else None
        end = None if packed else part.stop
        first = max(part.start, at)
        begin, before = go_to(file, max(first, header.end)), 0
        read = begin - first  # the header, where the part begins with it
        blocks = record_blocks(file, part.source.kind, begin, end, reading.batch_bytes, reading.max_document_bytes)
        for block in blocks:
            texts: list[str] = []
            positions: list[int] = []
            for position, record in block.records:
                if not record.strip(b"\r\n"):
                    continue
                found = _field(record, header, part, reading)
                if (text := rejects.taken(found, partial(line_place, part, position, reading))) is not None:
                    texts.append(text)
                    positions.append(position)
            if block.too_long is not None:
                rejects.taken((None, _too_long(reading)), partial(line_place, part, block.too_long, reading))
            size = packed.packed_bytes - before if packed else block.size + read
            before, read = before + size, 0
            yield DocumentBatch(texts, size, DocumentOffset(0, block.offset), positions)


def _field(record: bytes, header: Header, part: SourcePart, reading: ReadOptions) -> tuple[str | None, str]:
    """The document of a record; or None, and what is wrong with it."""
    if len(record) > reading.max_document_bytes:
        return None, _too_long(reading)
    fields, reason = _fields(record, part.source.kind)
    if fields is None:
        return None, reason
    if len(fields) != header.columns:
        return None, f"{len(fields)} fields, expected {header.columns} as in the header; {_quoting(part)}."
    return checked(fields[header.column], f'column "{reading.column}"', reading)


def _fields(record: bytes, kind: str) -> tuple[list[str] | None, str]:
    """The fields of a record; or None, and why there are none."""
    if b"\0" in record:
        return None, "a NUL byte, as of a damaged or binary file."
    try:
        [fields] = csv.reader((record.decode(),), delimiter=DELIMITERS[kind], strict=True)
    except UnicodeDecodeError as error:
        return None, f"byte {error.start} of the record is not UTF-8 text."
    except csv.Error as error:
        if str(error) == "unexpected end of data":
            return None, "a quote that is never closed."
        carriage = " A carriage return alone ends no line." if "new-line" in str(error) else ""
        return None, f"not as RFC 4180 has it: {str(error).partition(' - ')[0]}.{carriage}"
    return fields, ""


def _header(part: SourcePart, reading: ReadOptions) -> Header | None:
    """Of the file; None where it holds no record. Raises UserError where it does not have the column."""
    source = part.source
    with opened(source, reading.max_expansion, reading.flags) as file:
        for block in record_blocks(file, source.kind, 0, None, HEAD_BYTES, HEADER_BYTES):
            for position, record in block.records:
                raw = record.removeprefix(codecs.BOM_UTF8) if position == 0 else record
                if raw.strip(b"\r\n"):
                    return _named(raw, position + len(record), part, reading)
            if block.too_long is not None:
                raise UserError(
                    f"{source.path}: its first record has more than {HEADER_BYTES:,} bytes or a quote that is never "
                    "closed; expected the names of the columns."
                )
    return None


def _named(record: bytes, end: int, part: SourcePart, reading: ReadOptions) -> Header:
    path, wanted = part.source.path, reading.column
    names, reason = _fields(record, part.source.kind)
    if names is None:
        raise UserError(f"{path}: the header: {reason} Expected the names of the columns, in UTF-8.")
    if names.count(wanted) != 1:
        found = "twice" if wanted in names else "no"
        listed = ", ".join(shown(name) for name in names[:20])
        kinds = "; ".join(f"{DELIMITERS[kind]!r} in .{kind}" for kind in DELIMITERS)
        hint = f" Columns are separated by {kinds}." if len(names) == 1 else ""
        if len(names) == 1 and ";" in names[0]:
            hint += f" Convert it: `{_WITH_COMMAS} < IN > OUT`."
        elif reading.csv_column and wanted not in names:
            hint += " Or leave the file out: name those that have it, as by a glob."
        problem = f'column "{wanted}" {found}' if found == "twice" else f'no column "{wanted}"'
        raise UserError(f"{path}: {problem}; found: {listed}. Set {reading.flags}csv_column to one of them.{hint}")
    return Header(end, names.index(wanted), len(names))


def _quoting(part: SourcePart) -> str:
    sign = "commas" if part.source.kind == "csv" else "tabs"
    return f"a field that holds {sign}, quotes or line ends stands in quotes"


def _too_long(reading: ReadOptions) -> str:
    return f"{too_long(reading)[:-1]}, and if each quote before it is closed."
