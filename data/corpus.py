"""The built-in corpus: the running interpreter's standard library, always there, offline, real."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from program.errors import UserError
from program.untrusted import read_bytes

MAX_BYTES = 8_000_000
# Tests are repetitive; encodings are tables; the rest are parts that distributions ship separately or write
# at install time, so that two machines with one Python version might differ in them.
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "encodings", "__pycache__", "site-packages", "dist-packages"}
    | {"lib-dynload", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip", "distutils"}
)
SKIPPED_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize", "turtle")


def files(root: Path | None = None, max_bytes: int | None = None) -> list[Path]:
    """The corpus's files, at most `max_bytes` (8 MB) together; every file is one document.

    They are ordered by a hash of their name: the same on every machine, subjects mixed, so that the bounded
    part and the last documents (which are held out) are spread over the whole library.
    Raises UserError where the interpreter has no sources on disk.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    chosen, total = [], 0
    for path in sorted(_sources(root), key=lambda path: _name_hash(path.relative_to(root))):
        total += path.stat().st_size
        if total > (max_bytes or MAX_BYTES):
            break
        if _is_text(path):
            chosen.append(path)
    if not chosen:
        raise UserError(f"data: the built-in corpus is empty: no .py files below {root}. Set data.paths.")
    return chosen


def _sources(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS and not name.startswith("config-")]
        for name in names:
            if name.endswith(".py") and not name.startswith(SKIPPED_FILES):
                yield Path(folder, name)


def _name_hash(name: Path) -> bytes:
    return hashlib.blake2b(name.as_posix().encode(), digest_size=16).digest()


def _is_text(path: Path) -> bool:
    try:
        return bool(read_bytes(path).decode("utf-8"))
    except UnicodeDecodeError:
        return False
