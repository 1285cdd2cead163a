"""The one door for files and texts from outside: recipes, manifests, records, tables, configurations.

Opens regular files only, never waits for one, limits size and depth, and checks what is in it against a type
(``program.schema``). What is wrong with the content is one ``InputError``, which a reader of checkpoints takes for
damage; what the system says (no such file, no permission, a disk that fails) stays the OSError that it is, since a
file server that is away for a moment is no bad input. Standard library only: watchdogs run without site-packages.
"""

import errno
import json
import os
import re
import stat
import tomllib
from collections import Counter
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn

from program.errors import UserError
from program.schema import JSON, Foreign, shown, structured

JSON_BYTES, TOML_BYTES, TEXT_BYTES = 64 << 20, 4 << 20, 16 << 20
"""Largest file of each kind that is read, but where a reader says otherwise."""
MOST_PROBLEMS = 20
_KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}  # fmt: skip


class InputError(UserError, ValueError):
    """What ``where`` (a file, or a place in one) holds cannot be used. ``problem``: expected and found."""

    def __init__(self, where: object, problem: str) -> None:
        super().__init__(f"{where}: {problem}")
        self.where, self.problem = where, problem


def open_regular(path: Path) -> FileIO:
    """A regular file, open for reading, unbuffered. Raises as ``regular_descriptor``."""
    return FileIO(regular_descriptor(path), "rb")


def append_regular(path: Path) -> FileIO:
    """A regular file, made where it is not there, open for appending, unbuffered. Raises as ``regular_descriptor``."""
    return FileIO(regular_descriptor(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")


def regular_descriptor(path: Path, flags: int = os.O_RDONLY) -> int:
    """A regular file's descriptor. A FIFO, device, socket, folder or circle of links is an InputError, at once.

    Raises OSError where the system refuses it.
    """
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno == errno.EISDIR:
            raise InputError(path, "expected a regular file, found a folder.") from None
        if error.errno == errno.ELOOP:
            raise InputError(path, "expected a regular file, found a circle of links.") from None
        if error.errno in (errno.ENXIO, errno.ENODEV):
            raise InputError(path, "expected a regular file, found a socket or a device.") from None
        raise
    except ValueError:
        raise InputError(repr(str(path)), "a name with a NUL character; expected a file's name.") from None
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        raise InputError(path, f"expected a regular file, found {_KINDS.get(kind, 'something else')}.")
    return descriptor


def read_bytes(path: Path, most_bytes: int = TEXT_BYTES) -> bytes:
    """All of a regular file of at most ``most_bytes``. Raises InputError, or the system's OSError."""
    with open_regular(path) as file:
        pieces, left = [], most_bytes + 1
        if os.fstat(file.fileno()).st_size > most_bytes:
            left = 0
        while left and (piece := file.read(min(left, 1 << 20))):  # in pieces: files of /proc have no size
            pieces.append(piece)
            left -= len(piece)
    if not left:
        raise InputError(path, f"expected at most {most_bytes:,} bytes, found more.")
    return b"".join(pieces)


def read_text(path: Path, most_bytes: int = TEXT_BYTES) -> str:
    """A regular file as UTF-8 text, without the byte order mark that some editors write."""
    return _decoded(read_bytes(path, most_bytes), path)


def read_json[T](path: Path, kind: type[T] | Any = JSON, most_bytes: int = JSON_BYTES) -> Any:
    """A JSON file as ``kind`` (see ``program.schema``); keys that a dataclass lacks are ignored."""
    return parse_json(read_bytes(path, most_bytes), kind, path)


def read_foreign[T](path: Path, kind: type[T] | Any = Foreign) -> Any:
    """A JSON file of Hugging Face's libraries, as ``kind``: an object, or what a dataclass reads of one.

    They read it with Python's json: what that takes and is not used here is no problem, be it NaN, a number of thirty
    digits, half a surrogate pair or a name that is there twice, whose last value counts.
    """
    return _checked(json_value(read_bytes(path, JSON_BYTES), path, constants=True), kind, path, None)


def if_readable[T](read: Callable[..., T], path: Path, *more: Any) -> T | None:
    """What a function of this file reads of ``path``; None where that is not there, or not what it should be."""
    try:
        return read(path, *more)
    except (OSError, InputError):
        return None


def json_value(
    data: bytes | str, where: object = "a message", *, unique_names: bool = False, constants: bool = False
) -> Any:
    """JSON as it is, for large tables, whose reader checks each entry itself. Raises InputError for what is no JSON.

    unique_names: an object that has a name twice is none; otherwise its last value counts. constants: Python's words
    NaN and Infinity, which are no JSON, are numbers.
    """
    pairs = _unique if unique_names else None
    try:
        text = data if isinstance(data, str) else _decoded(data, where)
        return json.loads(text, parse_constant=None if constants else _refuse, object_pairs_hook=pairs)
    except RecursionError:
        raise InputError(where, "lists and objects nest too deep.") from None
    except ValueError as error:  # of the decoder, or of int() for thousands of digits
        raise InputError(where, f"not JSON: {_first_line(error)}.") from None


def parse_json(
    data: bytes | str,
    kind: Any = JSON,
    where: object = "a message",
    unknown_key: Callable[[str, type], str] | None = None,
    *,
    unique_names: bool = False,
) -> Any:
    """JSON as ``kind``. Raises InputError with every problem; ``where`` says of what.

    unknown_key: as of read_toml. unique_names: as of json_value.
    """
    return _checked(json_value(data, where, unique_names=unique_names), kind, where, unknown_key)


def read_toml(
    path: Path,
    kind: Any = JSON,
    unknown_key: Callable[[str, type], str] | None = None,
    prepare: Callable[[dict[str, Any], Path], dict[str, Any]] | None = None,
) -> Any:
    """A TOML file as ``kind``. unknown_key: what to say of keys that a dataclass lacks; None: they are ignored.

    prepare: changes the table before it is checked.
    """
    table = toml_table(read_text(path, TOML_BYTES), path)
    return _checked(prepare(table, path) if prepare else table, kind, path, unknown_key)


def parse_toml(
    text: str, kind: Any = JSON, where: object = "a recipe", unknown_key: Callable[[str, type], str] | None = None
) -> Any:
    """TOML as ``kind``. Raises InputError with every problem; ``where`` says of what."""
    return _checked(toml_table(text, where), kind, where, unknown_key)


MOST_DOTS = 64
QUOTED_PARTS = re.compile(r"""["']\s*\.\s*["']""")


def _has_long_keys(text: str) -> bool:
    """Whether a key has more parts than tables may nest: tomllib takes hours for one of 100,000. In linear time, so by
    what stands before "=" on a line or in an inline table, or is a header."""
    pieces = (piece.partition("=") for line in text.splitlines() for piece in re.split("[{,]", line))
    return any(
        key.count(".") > MOST_DOTS and sum(1 for part in key.split(".") if part.strip()) > MOST_DOTS
        for key, equals, _ in pieces
        if not key.lstrip().startswith("#") and (equals or not _is_text(key))
    )


def _is_text(piece: str) -> bool:
    """Whether it is a quoted text, which may have as many sentences as it likes, and not parts of a key."""
    return piece.lstrip()[:1] in ('"', "'") and not QUOTED_PARTS.search(piece)


def toml_table(text: str, where: object) -> dict[str, Any]:
    """TOML as it is. Raises InputError where it is none, or nests too deep."""
    if _has_long_keys(text):
        raise InputError(where, f"a key of more than {MOST_DOTS} parts, with dots between.")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise InputError(where, "lists and tables nest too deep.") from None
    except ValueError as error:
        raise InputError(where, f"not valid TOML: {_first_line(error)}") from None


def _checked(value: object, kind: Any, where: object, unknown_key: Callable[[str, type], str] | None) -> Any:
    found, problems = structured(value, kind, unknown_key)
    if problems:
        more = f"\n{where}: and {len(problems) - MOST_PROBLEMS} more." if len(problems) > MOST_PROBLEMS else ""
        raise InputError(where, f"\n{where}: ".join(problems[:MOST_PROBLEMS]) + more)
    return found


def _decoded(data: bytes, where: object) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        found = f"expected UTF-8 text, found {data[error.start]:#04x}"
        raise InputError(where, f"byte {error.start}: {found}.") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{shown(twice)} is there twice")
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
