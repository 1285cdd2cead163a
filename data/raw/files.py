"""A file's content as bytes and as text, of the file that was found at the start and of no other."""

import codecs
import io
import os
from pathlib import Path
from typing import BinaryIO

from data.raw.compressed import Unpacked
from data.raw.identity import ends_digest
from data.raw.inputs import InputSource
from program.errors import UserError
from program.untrusted import open_regular


def opened(source: InputSource, max_expansion: float, flags: str) -> io.BufferedReader:
    """The content of a file, unpacked. flags: what stands before max_expansion where a user sets it.

    Raises UserError where it is not the file that was found.
    """
    file = open_regular(Path(source.path))
    try:
        check_is_same(file, source)
    except UserError:
        file.close()
        raise
    if not source.compression:
        return io.BufferedReader(file, 1 << 20)
    flag = f"{flags}max_expansion"
    unpacked = Unpacked(file, source.compression, source.path, source.size, max_expansion, flag)
    return io.BufferedReader(unpacked, 1 << 20)


def check_is_same(file: BinaryIO, source: InputSource) -> None:
    """By size, time of change, beginning and end: of another file, offsets lead anywhere."""
    status = os.fstat(file.fileno())
    found = status.st_size, status.st_mtime_ns, ends_digest(file.fileno(), status.st_size)
    expected = source.size, source.changed_ns, source.ends
    if found != expected:
        names = ("size", "time of change", "beginning or end")
        wrong = next(name for name, one, other in zip(names, found, expected, strict=True) if one != other)
        raise UserError(
            f"{source.path} is no longer the file that was there at the start: its {wrong} is another. Put the former "
            "file back, or start again with this one as another input."
        )


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
