"""An input file, on a disk or in a bucket: its content as bytes and as text, of the file that was found at first."""

import codecs
import errno
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from data.raw.compressed import Unpacked
from data.raw.identity import ends_digest
from program.buckets import client
from program.buckets.client import ObjectFacts, ObjectFile
from program.buckets.names import is_url
from program.errors import UserError
from program.untrusted import open_regular

Kind = Literal["jsonl", "text", "parquet", "csv", "tsv", "dataset"]
BUFFER_BYTES = 1 << 20
"""Of an object, asked for at a time."""


class InputFacts(NamedTuple):
    """What tells a file from another."""

    size: int
    """Bytes."""
    changed_ns: int
    """Time of the last change."""
    ends: str
    """Digest of a file's beginning and end; an object's ETag."""


@dataclass(frozen=True, slots=True)
class InputSource:
    """One input file, or one dataset."""

    path: str
    """As it was given, or found in a folder; a dataset's id or folder."""
    kind: Kind
    compression: str
    """".gz", ".zst", ".bz2", ".xz" or nothing."""
    size: int
    """Bytes on disk; of a dataset, its shards or rows."""
    changed_ns: int = 0
    """Time of the last change."""
    ends: str = ""
    """Digest of a file's beginning and end."""
    revision: str = ""
    """Of a dataset; what is read stays that one."""

    @property
    def facts(self) -> InputFacts:
        """What tells a file from another."""
        return InputFacts(self.size, self.changed_ns, self.ends)


class InputObject(ObjectFile):
    """An object whose errors are the input's."""

    def read_range(self, start: int, stop: int) -> bytes:
        """Bytes ``start`` to ``stop``. Raises UserError."""
        try:
            return super().read_range(start, stop)
        except OSError as error:
            if error.errno == errno.ESTALE:
                raise UserError(another(self.facts.url, "content")) from None
            raise UserError(f"{self.facts.url}: {error.strerror}.") from None


def open_input(path: str, expected: InputFacts | None = None) -> io.FileIO | io.BufferedReader:
    """A file or an object, for reading. expected: what was found of it, so that an object is not looked up again, and
    is refused where it is another when it is read. Raises UserError, and the system's OSError for a file.
    """
    if not is_url(path):
        return open_regular(Path(path))
    try:
        known = expected and ObjectFacts(path, expected.size, expected.ends, expected.changed_ns)
        found = known or client.facts(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}.") from None
    return io.BufferedReader(InputObject(found), BUFFER_BYTES)


def facts_of(file: BinaryIO) -> InputFacts:
    """Of what is open."""
    raw = getattr(file, "raw", None)
    if isinstance(raw, ObjectFile):
        return InputFacts(raw.facts.size, raw.facts.changed_ns, raw.facts.etag)
    status = os.fstat(file.fileno())
    return InputFacts(status.st_size, status.st_mtime_ns, ends_digest(file.fileno(), status.st_size))


def another(path: str, what: str) -> str:
    """That a file is not the one that was found."""
    return (
        f"{path} is no longer the file that was there at the start: its {what} is another. Put the former file back, "
        "or start again with this one as another input."
    )


def opened(source: InputSource, max_expansion: float, flags: str) -> io.BufferedReader:
    """The content of a file, unpacked. flags: what stands before max_expansion where a user sets it.

    Raises UserError where it is not the file that was found.
    """
    file = open_same(source)
    if not source.compression:
        return file if isinstance(file, io.BufferedReader) else io.BufferedReader(file, 1 << 20)
    flag = f"{flags}max_expansion"
    unpacked = Unpacked(file, source.compression, source.path, source.size, max_expansion, flag)
    return io.BufferedReader(unpacked, 1 << 20)


def open_same(source: InputSource) -> io.FileIO | io.BufferedReader:
    """The file that was found, by size, time of change, beginning and end: of another one, offsets lead anywhere.

    Raises UserError where it is not; for an object, when it is read first.
    """
    file = open_input(source.path, source.facts)
    whats = zip(("size", "time of change", "beginning or end"), facts_of(file), source.facts, strict=True)
    if wrong := [what for what, one, other in whats if one != other]:
        file.close()
        raise UserError(another(source.path, wrong[0]))
    return file


def for_arrow(file: BinaryIO, source: InputSource) -> BinaryIO | str:
    """What pyarrow reads best of an open file: one on a disk by its name, without Python."""
    return file if is_url(source.path) else source.path


def decoded(raw: bytes, before: int, path: str) -> str:
    """Text of a file, without the byte order mark that some programs begin one with. before: bytes of it before `raw`.

    Raises UserError where it is none.
    """
    mark = 0 if before or not raw.startswith(codecs.BOM_UTF8) else len(codecs.BOM_UTF8)
    nul = raw.find(b"\0")
    if nul >= 0:
        raise UserError(f"{path} (byte {before + nul}): not text: a NUL byte, as of a damaged or binary file.")
    try:
        return raw[mark:].decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} (byte {before + mark + error.start}): not UTF-8 text.") from None
