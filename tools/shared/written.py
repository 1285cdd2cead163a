"""Where a tool may write: to a free name, or over a file that it wrote itself; and into the folder of a run or a
checkpoint only under names that are the tool's own there.

Asked before the work begins, and again when the file is written.
"""

import fnmatch
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from program.durable import replace_file
from program.errors import UserError
from training.checkpoint.format.manifest import MANIFEST

RUNS_FILES = ("owner.json", "history.jsonl", "metrics.jsonl", "watch", "checkpoints")
"""Beside config.toml, one of them tells a run's folder."""
RUNS_FOLDERS = {"checkpoints", "logs", "watch", "events", "profile", "nonfinite", "doctor"}
"""In a run's folder, what runs and tools write by themselves."""
ENDS_BYTES = 1 << 16
"""Of an existing file, read from its beginning and from its end to know whose it is."""
Ours = Callable[[bytes], bool]
"""Whether a file with this beginning and end (of a small one: all of it) is one that the tool writes."""


def marked(*marks: str) -> Ours:
    """By texts that only files of this tool hold."""
    return lambda ends: all(mark.encode() in ends for mark in marks)


def is_list_of_nodes(ends: bytes) -> bool:
    """Names of hosts, one a line; some sites have "_" in theirs."""
    return all(line.translate(None, b"-._").isalnum() for line in ends.split())


def check_file(path: Path, flag: str, ours: Ours, own_names: Sequence[str] = ()) -> None:
    """Raises UserError where ``path`` is not for this tool to write. flag: as the user gives it, or empty.

    own_names: patterns of names that the tool has in a run's folder.
    """
    where = f"{flag} {path}" if flag else str(path)
    check_place(path, flag, own_names)
    try:
        facts = path.stat()
    except OSError:
        return  # it is free, or writing will tell
    if is_stream(facts.st_mode):
        return
    if not stat.S_ISREG(facts.st_mode):
        raise UserError(f"{where}: is no file. Give a file's name.")
    if facts.st_size and not ours(_ends(path, facts.st_size, where)):
        raise UserError(
            f"{where}: is there already, and is not a file that this tool writes. Give a name that is free."
        )


def is_stream(mode: int) -> bool:
    """A terminal, /dev/null or a pipe: nothing in it can be lost."""
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)


def _ends(path: Path, size: int, where: str) -> bytes:
    try:
        with path.open("rb") as file:
            head = file.read(ENDS_BYTES)
            file.seek(max(len(head), size - ENDS_BYTES))
            return head + file.read(ENDS_BYTES)
    except OSError as error:
        raise UserError(f"{where}: cannot be read: {error.strerror}. Give another name.") from None


def check_place(path: Path, flag: str = "", own_names: Sequence[str] = ()) -> None:
    """Raises UserError where ``path`` would lie in a run's or a checkpoint's folder. A user's own folder in a run's
    is no part of the run."""
    own, *above = path.absolute().parent.resolve() / path.name, *path.absolute().parent.resolve().parents
    below = own.name
    for folder in (own.parent, *above):
        if (folder / MANIFEST).is_file():
            what = "a checkpoint's folder"
        elif is_run(folder) and (folder == own.parent or below in RUNS_FOLDERS):
            what = "a run's folder"
            if folder == own.parent and any(fnmatch.fnmatchcase(own.name, name) for name in own_names):
                return
        else:
            below = folder.name
            continue
        names = f", or one of {', '.join(own_names)}" if own_names and what == "a run's folder" else ""
        raise UserError(f"{f'{flag} ' if flag else ''}{path}: lies in {what}, {folder}. Give a name elsewhere{names}.")


def is_run(folder: Path) -> bool:
    """Whether a run wrote this folder."""
    return (folder / "config.toml").is_file() and any((folder / name).exists() for name in RUNS_FILES)


def write_file(path: Path, data: bytes, flag: str, ours: Ours, own_names: Sequence[str] = ()) -> None:
    """Whole, or not at all. Raises UserError as ``check_file``, and where it cannot be written."""
    check_file(path, flag, ours, own_names)
    try:
        if path.exists() and is_stream(path.stat().st_mode):
            path.write_bytes(data)
        else:
            replace_file(path.resolve(), data, suffix=".unfinished", durable=False)
    except OSError as error:
        raise UserError(
            f"{f'{flag} ' if flag else ''}{path}: cannot be written: {error.strerror}. Give another name."
        ) from None


def check_new(path: Path, flag: str = "") -> None:
    """Raises UserError where ``path`` is not free, or not for a tool to write."""
    if os.path.lexists(path):
        raise UserError(f"{f'{flag} ' if flag else ''}{path}: already there. Give a name that is free, or remove it.")
    check_place(path, flag)


def write_new(path: Path, text: str) -> None:
    """Raises UserError as ``check_new``, and where it cannot be written."""
    check_new(path)
    write_file(path, text.encode(), "", lambda _: False)
