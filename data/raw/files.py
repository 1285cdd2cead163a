"""A file's content as bytes and as text, of the file that was found at the start and of no other."""

import codecs
import io
from typing import BinaryIO

from data.raw.compressed import Unpacked
from data.raw.input_file import another, facts_of, open_input
from data.raw.inputs import InputSource
from program.buckets import names
from program.errors import UserError


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
    found = facts_of(file)
    if found != source.facts:
        file.close()
        whats = ("size", "time of change", "beginning or end")
        raise UserError(
            another(
                source.path,
                next(what for what, one, other in zip(whats, found, source.facts, strict=True) if one != other),
            )
        )
    return file


def for_arrow(file: BinaryIO, source: InputSource) -> BinaryIO | str:
    """What pyarrow reads best of an open file: one on a disk by its name, without Python."""
    return file if names.is_url(source.path) else source.path


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
