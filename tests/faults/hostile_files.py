"""A file replaced by what is none, or by another: FIFO, folder, links, devices, sockets, sizes, names. From a seed."""

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from random import Random

from tests.faults.hostile_mutations import Mutation

PRECIOUS = "precious.txt"
"""Lies beside what a command works on, and links lead to it: nothing may change it."""
SPARSE_BYTES = 1 << 40


def replace(path: Path, draw: Random) -> Mutation:
    """Put something else in the place of a file or a folder."""
    kinds = REPLACEMENTS if path.is_file() else {name: REPLACEMENTS[name] for name in FOR_FOLDERS}
    kind = draw.choice(list(kinds))
    kinds[kind](path)
    return Mutation(kind=f"file: {kind}", file=path.name, text=f"{path.name}: {kind}")


def _without(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def put(path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
        make(path)

    return put


def _link_to(target: str) -> Callable[[Path], None]:
    return _without(lambda path: path.symlink_to(target))


def _socket(path: Path) -> None:
    before = Path.cwd()  # a socket's path is short
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name[:100])
        if path.name[:100] != path.name:
            Path(path.name[:100]).rename(path.name)
    finally:
        os.chdir(before)


def _loop(path: Path) -> None:
    other = path.with_name(f"{path.name}.loop")
    path.symlink_to(other.name)
    other.symlink_to(path.name)


def _precious(path: Path) -> None:
    depth = next(parent for parent in path.parents if (parent / PRECIOUS).exists())
    path.symlink_to(os.path.relpath(depth / PRECIOUS, path.parent))


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(SPARSE_BYTES)


def _grown(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(SPARSE_BYTES)


def _hidden(path: Path) -> None:
    path.rename(path.with_name(path.name.swapcase()))


def _foreign(path: Path) -> None:
    for name in ("notes.txt", "x" * 250, "\x1b[31mred", os.fsdecode(b"\xff\xfe.json"), ".hidden", "a\nb"):
        path.with_name(name).write_text("somebody's own")


def _copied(path: Path) -> None:
    """Under a name that could be another one of its kind."""
    shutil.copyfile(path, path.with_name(f"{path.stem}-2{path.suffix}"))
    shutil.copyfile(path, path.with_name(f"{path.name}.partial"))


REPLACEMENTS: dict[str, Callable[[Path], None]] = {
    "FIFO": _without(os.mkfifo),
    "folder": _without(Path.mkdir),
    "dangling link": _link_to("nowhere/at/all"),
    "circle of links": _without(_loop),
    "link to /dev/zero": _link_to("/dev/zero"),
    "link to /dev/full": _link_to("/dev/full"),
    "link to itself": _without(lambda path: path.symlink_to(path.name)),
    "link to another's file": _without(_precious),
    "socket": _without(_socket),
    "1 TB, sparse": _without(_sparse),
    "1 TB more, sparse": _grown,
    "gone": _without(lambda _: None),
    "other case": _hidden,
    "foreign files": _foreign,
    "copies": _copied,
}
FOR_FOLDERS = (
    "FIFO", "dangling link", "circle of links", "link to /dev/zero", "link to itself", "link to another's file",
    "socket", "gone", "other case", "foreign files",
)  # fmt: skip
