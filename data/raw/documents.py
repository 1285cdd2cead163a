"""The documents of a unit, in batches, and what becomes of those that are not as they should be."""

import codecs
import json
from collections.abc import Iterator
from functools import partial
from typing import Any, BinaryIO

from data.raw import hub
from data.raw.compressed import Unpacked
from data.raw.csv_documents import read_csv
from data.raw.fields import arrow_leaf, arrow_names, arrow_path, names_in, value_at
from data.raw.input_file import decoded, for_arrow, open_same, opened
from data.raw.reading import (
    BATCH_ROWS,
    BEGIN,
    DocumentBatch,
    DocumentOffset,
    ReadOptions,
    Rejects,
    checked,
    go_to,
    line_place,
    skip_line,
    too_long,
)
from data.raw.units import SourcePart, Unit
from program.errors import UserError

try:
    from orjson import loads as fast_loads  # several times as fast; what it refuses is asked of json again
except ImportError:

    def fast_loads(line: bytes, /) -> Any:  # type: ignore[misc]
        """Refuses everything."""
        raise ValueError


def read(unit: Unit, reading: ReadOptions, rejects: Rejects, start: DocumentOffset = BEGIN) -> Iterator[DocumentBatch]:
    """A unit's documents, all of them or those from the batch on that began at `start`: it and those after it are
    the same then. What lies before is found by seeking in a plain file, and unpacked, but not parsed, in another.

    Raises UserError for files that cannot be read or unpacked, and as `rejects` says.
    """
    readers = {
        "jsonl": _jsonl, "text": _text, "csv": read_csv, "tsv": read_csv, "parquet": _parquet, "dataset": _dataset,
    }  # fmt: skip
    for number, part in enumerate(unit.parts[start.part :], start.part):
        at = start.at if number == start.part else 0
        try:
            for batch in readers[part.source.kind](part, at, reading, rejects):
                yield batch._replace(place=DocumentOffset(number, batch.place.at))
        except FileNotFoundError:
            raise UserError(f"{part.source.path} was removed meanwhile.") from None


def where(unit: Unit, batch: DocumentBatch, number: int, reading: ReadOptions) -> str:
    """The place of a batch's text, for messages. It may be read up to there."""
    part, position = unit.parts[batch.place.part], batch.positions[number]
    if part.source.kind in ("jsonl", "csv", "tsv"):
        return line_place(part, position, reading)
    return part.source.path if part.source.kind == "text" else _row(part, position)


def _jsonl(part: SourcePart, at: int, reading: ReadOptions, rejects: Rejects) -> Iterator[DocumentBatch]:
    """The lines that begin within the part."""
    with opened(part.source, reading.max_expansion, reading.flags) as file:
        packed = file.raw if isinstance(file.raw, Unpacked) else None
        end = None if packed else part.stop
        begin, before = go_to(file, max(part.start, at)), 0
        for offset, block in _blocks(file, begin, end, part, reading, rejects):
            texts, positions = _parse(block, offset, part, reading, rejects)
            size = packed.packed_bytes - before if packed else len(block)
            before += size
            yield DocumentBatch(texts, size, DocumentOffset(0, offset), positions)


def _blocks(
    file: BinaryIO, start: int, stop: int | None, part: SourcePart, reading: ReadOptions, rejects: Rejects
) -> Iterator[tuple[int, bytes]]:
    """Offset and content of stretches of whole lines, which all begin in [start, stop); the file is at `start`."""
    while stop is None or start < stop:
        block = file.read(reading.batch_bytes if stop is None else min(reading.batch_bytes, stop - start))
        if not block:
            return
        size = len(block)
        if not block.endswith(b"\n"):
            rest = file.readline(reading.max_document_bytes)
            block, size = block + rest, size + len(rest)
            if len(rest) == reading.max_document_bytes and not rest.endswith(b"\n"):
                line_start = block.rfind(b"\n") + 1
                place, block = start + line_start, block[:line_start]
                rejects.reject(lambda: f"{line_place(part, place, reading)}: {too_long(reading)}")  # noqa: B023
                size += skip_line(file)
        yield start, block
        start += size


def _parse(
    block: bytes, offset: int, part: SourcePart, reading: ReadOptions, rejects: Rejects
) -> tuple[list[str], list[int]]:
    """The documents of a stretch of lines, and where their lines begin."""
    key, limit, position = reading.jsonl_key, reading.max_document_bytes, offset
    is_nested = "." in key
    texts: list[str] = []
    positions: list[int] = []
    if not offset and block.startswith(codecs.BOM_UTF8):  # a file's, which some programs begin text with
        block, position = block.removeprefix(codecs.BOM_UTF8), len(codecs.BOM_UTF8)
    for line in block.split(b"\n"):
        if line and not line.isspace():
            try:
                value = fast_loads(line)
                text = value_at(value, key) if is_nested else value[key]
                is_good = type(text) is str and len(line) <= limit
            except (ValueError, KeyError, TypeError, IndexError):
                is_good = False
            if not is_good:  # what the fast way does not take may be right all the same
                text = rejects.taken(field_of(line, reading), partial(line_place, part, position, reading))
            if text is not None:
                texts.append(text)
                positions.append(position)
        position += len(line) + 1
    return texts, positions


def field_of(line: bytes, reading: ReadOptions) -> tuple[str | None, str]:
    """The document on a line; or None, and what is wrong with it."""
    key = reading.jsonl_key
    if len(line) > reading.max_document_bytes:
        return None, too_long(reading)
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return None, f"byte {error.start} of the line is not UTF-8 text."
    except (ValueError, RecursionError) as error:
        return None, f"not JSON: {error}."
    try:
        return checked(value_at(value, key), f'field "{key}"', reading)
    except KeyError:
        found = names_in(value) if isinstance(value, dict) else f"a {type(value).__name__}"
        return None, f'no field "{key}"; found: {found}. Set {reading.flags}jsonl_key.'


def _row(part: SourcePart, number: int) -> str:
    group = "step" if part.source.kind == "dataset" else "row group"
    return f"{part.source.path}: {group} {part.start}, row {number}"


def _text(part: SourcePart, at: int, reading: ReadOptions, rejects: Rejects) -> Iterator[DocumentBatch]:
    """One document, the whole file."""
    with opened(part.source, reading.max_expansion, reading.flags) as file:
        raw = file.read(reading.max_document_bytes + 1)
    texts = []
    if len(raw) > reading.max_document_bytes:
        rejects.reject(lambda: f"{part.source.path}: {too_long(reading)}")
    else:
        try:
            texts.append(decoded(raw, 0, part.source.path))
        except UserError as error:
            reason = str(error)
            rejects.reject(lambda: reason)
    yield DocumentBatch(texts, part.size, positions=[0] * len(texts))


def _parquet(part: SourcePart, at: int, reading: ReadOptions, rejects: Rejects) -> Iterator[DocumentBatch]:
    """The rows of row groups."""
    import pyarrow.parquet

    path, key = part.source.path, reading.jsonl_key
    try:
        with open_same(part.source) as raw, pyarrow.parquet.ParquetFile(for_arrow(raw, part.source)) as file:
            _check_column(file.schema_arrow, path, reading)
            batches = file.iter_batches(
                BATCH_ROWS, row_groups=range(part.start, part.stop), columns=[key], use_threads=False
            )
            rows = sum(file.metadata.row_group(group).num_rows for group in range(part.start, part.stop))
            row = 0
            for batch in batches:
                texts, positions, before = [], [], row
                if row < at:
                    row += len(batch)
                    continue
                for value in _values(_leaf(batch, key)):
                    text = rejects.taken(checked(value, f'column "{key}"', reading), partial(_row, part, row))
                    if text is not None:
                        texts.append(text)
                        positions.append(row)
                    row += 1
                size = part.size * row // max(1, rows) - part.size * before // max(1, rows)
                yield DocumentBatch(texts, size, DocumentOffset(0, before), positions)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: row group {part.start} cannot be read: {error}") from None


def _check_column(schema: Any, path: str, reading: ReadOptions) -> None:
    place = arrow_path(schema, reading.jsonl_key)
    name = reading.jsonl_key if place is None else schema.field(place[0]).name
    if (count := schema.names.count(name)) != 1 or place is None:
        what = f'no column "{reading.jsonl_key}"' if place is None else f'column "{name}" {count} times'
        raise UserError(f"{path}: {what}; found: {arrow_names(schema)}. Set {reading.flags}jsonl_key.")


def _leaf(batch: Any, key: str) -> Any:
    """The column of a batch, which has no others, or only those that a name with dots may mean as well."""
    top, *fields = arrow_path(batch.schema, key) or (0,)
    return arrow_leaf(batch.column(top), fields)


def _values(column: Any) -> list[Any]:
    """Of a column; as bytes where they should be text and are no UTF-8, which no writer checks."""
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        return [_value(one) for one in column]


def _value(one: Any) -> Any:
    try:
        return one.as_py()
    except UnicodeDecodeError:
        return one.as_buffer().to_pybytes()


def _dataset(part: SourcePart, at: int, reading: ReadOptions, rejects: Rejects) -> Iterator[DocumentBatch]:
    """The rows of a dataset's steps, some at a time."""
    texts: list[str] = []
    positions: list[int] = []
    size, begin, number = 0, at, at
    for row in hub.rows(part.source.path, part.source.revision, part.start, part.stop, at):
        try:
            value = value_at(row, reading.jsonl_key)
        except KeyError:
            problem = f'no column "{reading.jsonl_key}"; found: {names_in(row)}.'
            raise UserError(f"{part.source.path}: {problem} Set {reading.flags}jsonl_key.") from None
        found = checked(value, f'column "{reading.jsonl_key}"', reading)
        if (text := rejects.taken(found, partial(_row, part, number))) is not None:
            texts.append(text)
            positions.append(number)
            size += len(text.encode())
        number += 1
        if len(texts) >= BATCH_ROWS:
            yield DocumentBatch(texts, size, DocumentOffset(0, begin), positions)
            texts, positions, size, begin = [], [], 0, number
    yield DocumentBatch(texts, size, DocumentOffset(0, begin), positions)
