"""An input file, on a disk or in a bucket: opened for reading, and what tells it from another."""

import errno
import io
import os
from pathlib import Path
from typing import BinaryIO, NamedTuple

from data.raw.identity import ends_digest
from program.buckets import client, names
from program.buckets.client import ObjectFacts, ObjectFile
from program.errors import UserError
from program.untrusted import open_regular

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
    if not names.is_url(path):
        return open_regular(Path(path))
    found = look_up(path) if expected is None else ObjectFacts(path, expected.size, expected.ends, expected.changed_ns)
    return io.BufferedReader(InputObject(found), BUFFER_BYTES)


def look_up(url: str) -> ObjectFacts:
    """Of an object. Raises UserError where it is not there or cannot be seen."""
    try:
        return client.facts(url)
    except OSError as error:
        raise UserError(f"{url}: {error.strerror}.") from None


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
