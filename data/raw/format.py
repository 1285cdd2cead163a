"""What a file holds, by its content: packed or not, and which kind of documents. Its name is only a hint."""

import codecs
import re
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from data.raw import compressed

Kind = Literal["jsonl", "text", "parquet", "csv", "tsv", "json", "binary"]
"""All but the last two can be read."""
ENDINGS: dict[str, Kind] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    **dict.fromkeys((".txt", ".text", ".md", ".rst"), "text"),
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
HEAD_BYTES = 64 << 10
"""Unpacked bytes that a decision is made on."""
OBJECT = re.compile(rb'\s*\{\s*("(?:[^"\\]|\\.)*"\s*:|\}\s*$)')
"""How a JSON object begins."""
ARRAY_OF_OBJECTS = re.compile(rb'\s*\[\s*\{\s*"(?:[^"\\\n]|\\.)*"\s*:')
CSV_NAME = re.compile(r"[^\W\d][\w .-]{0,63}")
"""A name of a column."""
BINARIES = {
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF8": "a GIF image",
    b"%PDF-": "a PDF",
    b"PK\x03\x04": "a zip archive",
    b"\x7fELF": "a program",
    b"MMIDIDX": "the index of a token shard",
    b"\x93NUMPY": "a numpy array",
    b"ARROW1": "an Arrow file",
    b"Obj\x01": "an Avro file",
    b"SQLite format 3": "a SQLite database",
    b"\x89HDF": "an HDF5 file",
    b"\x04\x22\x4d\x18": "an lz4 archive",
    b"7z\xbc\xaf": "a 7z archive",
    b"]\0\0": "an .lzma archive (unpack it by `xz -d`, or pack it as .xz)",
    b"PAR1": "a part of a parquet file",
}
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class Format(NamedTuple):
    """What a file holds."""

    kind: Kind
    compression: str = ""
    """".gz", ".zst", ".bz2", ".xz" or nothing."""
    what: str = ""
    """Of what cannot be read: what it is, and what to do about it."""


def format_in(file: BinaryIO, path: Path) -> Format:
    """Of an open file, which is at its beginning. The path's ending decides where the content cannot tell."""
    packed = file.read(HEAD_BYTES)
    compression = compressed.compression_of(packed)
    ending = ending_of(path)
    named = ENDINGS.get(ending)
    if not compression:
        return _plain(packed, file, path, named, ending)
    file.seek(0)
    head = compressed.head(file, compression, path, HEAD_BYTES)
    if head is None:  # damaged: reading says where
        return Format(named or "text", compression)
    if again := compressed.compression_of(head):
        return Format("binary", compression, f"{again} within {compression}, packed twice. Unpack it once.")
    if head.startswith(b"PAR1"):
        return Format("binary", compression, "packed parquet; parquet is compressed inside. Unpack the file first.")
    return _text(head, len(head) < HEAD_BYTES, path, named, ending)._replace(compression=compression)


def ending_of(path: Path) -> str:
    """Of the name without what says how the file is packed."""
    name = Path(path.stem if path.suffix.lower() in compressed.ENDINGS else path.name)
    return name.suffix.lower()


def _plain(head: bytes, file: BinaryIO, path: Path, named: Kind | None, ending: str) -> Format:
    if head.startswith(b"PAR1") and (named == "parquet" or _last(file, 4) in (b"PAR1", b"PARE")):
        return Format("parquet")
    return _text(head, len(head) < HEAD_BYTES, path, named, ending)


def _last(file: BinaryIO, count: int) -> bytes:
    file.seek(max(0, file.seek(0, 2) - count))
    return file.read(count)


def _text(head: bytes, is_whole: bool, path: Path, named: Kind | None, ending: str) -> Format:
    """Of unpacked content. head: its beginning, or all of it. named: what the ending says."""
    head = head.removeprefix(codecs.BOM_UTF8)
    if not head.strip():
        return Format(named or "text")
    lines = [line for line in head.split(b"\n") if line and not line.isspace()]
    if _is_jsonl(lines, is_whole, named):
        return Format("jsonl")
    if named == "parquet":
        return Format("parquet")  # reading says that it is none
    if problem := _binary(head):
        return Format("binary", what=problem)
    if document := _json_document(head, lines, named == "jsonl" or not ending):
        return Format("json", what=document)
    if named in ("csv", "tsv"):
        return Format(named)
    if (named == "jsonl" or not ending) and (columns := _columns(lines, is_whole)):
        return Format(columns)
    return Format("jsonl" if named == "jsonl" else "text")


def _is_jsonl(lines: list[bytes], is_whole: bool, named: Kind | None) -> bool:
    """Whether the lines are JSON objects. A bad line may be among them where the name says that they are; else the
    first is one, and all others begin like one: prose never does."""
    complete = lines if is_whole else lines[:-1]
    if not complete:  # one line that is longer than the head
        return OBJECT.match(lines[0]) is not None
    if named == "jsonl":
        return any(map(_is_object, complete))
    return _is_object(complete[0]) and all(line.lstrip().startswith(b"{") for line in lines)


def _is_object(line: bytes) -> bool:
    return OBJECT.match(line) is not None and line.rstrip().endswith(b"}")


def _json_document(head: bytes, lines: list[bytes], is_expected: bool) -> str:
    """What a JSON document over several lines, or an array of objects, is; nothing for what is none.

    is_expected: whether the name does not speak against it: code and notebooks are text where they are named.
    """
    if ARRAY_OF_OBJECTS.match(head) or (is_expected and lines[0].strip() == b"["):
        return "one JSON array, expected a JSON object a line. Convert it: `jq -c '.[]' IN.json > OUT.jsonl`."
    second = lines[1].lstrip() if len(lines) > 1 else b""
    if is_expected and lines[0].lstrip().startswith(b"{") and second.startswith((b'"', b"}")):
        return "one JSON document over several lines, expected a line for each. Convert it: `jq -c . IN > OUT.jsonl`."
    return ""


def _binary(head: bytes) -> str:
    """What binary content is; nothing for text, in whatever encoding of bytes."""
    if head.startswith(UTF16):
        return "UTF-16 text, expected UTF-8. Convert it: `iconv -f UTF-16 -t UTF-8 IN > OUT`."
    nul = head.find(b"\0")
    if nul < 0 and _is_utf8(head):
        return ""
    known = next((name for magic, name in BINARIES.items() if head.startswith(magic)), "")
    if head[257:262] == b"ustar":
        known = "a tar archive"
    if not known and nul < 0:
        return ""  # another encoding: reading names the byte
    found = known or f"a NUL byte at byte {nul}: binary, or UTF-16 or UTF-32 text"
    return f"{found}; expected UTF-8 text, JSON lines, csv or parquet."


def _is_utf8(head: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return True


def _columns(lines: list[bytes], is_whole: bool) -> Literal["csv", "tsv"] | None:
    """By what columns are separated, where all lines have as many as the first has names; None for other text. Prose
    has blanks behind its commas.
    """
    import csv

    complete = [line.decode(errors="replace") for line in (lines if is_whole else lines[:-1])]
    kinds: tuple[tuple[Literal["csv", "tsv"], str], ...] = (("csv", ","), ("tsv", "\t"))
    for kind, separator in kinds:
        try:
            rows = list(csv.reader(complete, delimiter=separator))
        except csv.Error:
            continue
        rows = rows if is_whole else rows[:-1]  # quotes may go on behind the head
        if len(rows) < 3 or len(rows[0]) < 2 or any(len(row) != len(rows[0]) for row in rows):
            continue
        is_header = all(map(CSV_NAME.fullmatch, rows[0])) and len(set(rows[0])) == len(rows[0])
        if is_header and not any(cell.startswith(" ") for row in rows for cell in row):
            return kind
    return None
