"""Folders made once: built under a lock and a temporary name, renamed when they are whole."""

import contextlib
import errno
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from data.config import DataConfig, path_of
from data.raw.identity import ends_digest
from program.durable import sync_folder
from program.errors import UserError
from program.locks import locked
from program.schema import Count
from program.untrusted import InputError, open_regular, read_json

Console = Callable[[str], None]
SEAL = "whole.json"
"""Says what the files of a folder were when it was whole."""
HASHED_BYTES = 16 << 20
"""Files up to here are compared as a whole, larger ones by their size, beginning and end."""
NO_ROOM = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT),
    *(errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO),
)


def root(config: DataConfig) -> Path:
    """`data.cache_dir`, or the user's cache folder."""
    if config.cache_dir is not None:
        return path_of(config.cache_dir).absolute()
    import platformdirs

    try:
        found = Path(platformdirs.user_cache_dir("triplane"))
    except (KeyError, RuntimeError):
        found = Path()
    if not found.is_absolute():
        raise UserError(
            "data.cache_dir: this user has no home folder (neither HOME nor an entry in passwd) to keep prepared data "
            "in. Name a folder with data.cache_dir."
        )
    return found


def build_once(target: Path, build: Callable[[Path], None], console: Console) -> None:
    """Make sure that folder `target` holds what `build` made there; else build it, in one process at a time.

    A whole folder is used without a lock and without writing, so a read-only cache works. A build that is
    killed leaves a temporary folder that nothing reads and the next build removes. Where the file system has
    no locks, several processes may build the same thing and one of them wins.
    Raises UserError where the cache cannot be written.
    """
    if is_whole(target):
        return
    try:
        _make(target.parent)
        with _lock(target, console) as is_locked:
            if not is_whole(target):
                for leftover in target.parent.glob(f".{target.name}.*") if is_locked else ():
                    shutil.rmtree(leftover, ignore_errors=True)
                _build(target, build)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise _no_cache(target.parent, error) from error


def _make(folder: Path) -> None:
    """Whatever stands in the way of it: below /proc, say, there is "no such file"."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _no_cache(folder, error) from error


def _no_cache(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"data.cache_dir: cannot write below {folder}: {error.strerror}. Name another folder with data.cache_dir."
    )


def is_whole(folder: Path) -> bool:
    """Whether a folder holds the files that it was sealed with: none is missing, short, of another, or damaged at an
    end. False where that cannot be read.
    """
    try:
        sealed = read_json(folder / SEAL, dict[str, tuple[Count, str]])
        return bool(sealed) and all(
            (folder / name).name == name and _sum(folder / name) == sealed[name] for name in sealed
        )
    except (OSError, InputError):
        return False


def _sum(path: Path) -> tuple[int, str]:
    """Size and digest of a file."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > HASHED_BYTES:
            return size, ends_digest(file.fileno(), size)
        return size, hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _build(target: Path, build: Callable[[Path], None]) -> None:
    part = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}")
    part.mkdir()
    try:
        build(part)
        (part / SEAL).write_text(json.dumps({path.name: _sum(path) for path in sorted(part.iterdir())}))
        for path in part.iterdir():  # before the folder gets its name: a power cut must not leave it half empty
            sync_folder(path)
        if os.path.lexists(target) and not is_whole(target):
            _remove(target)
        try:
            part.rename(target)
        except OSError:  # without locks another process may have been faster
            if not is_whole(target):
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _remove(path: Path) -> None:
    """A folder, or what else stands in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


@contextlib.contextmanager
def _lock(target: Path, console: Console) -> Iterator[bool]:
    """Hold the lock of `target`; False where there are no locks."""
    path = target.with_name(f"{target.name}.lock")
    with contextlib.ExitStack() as stack:
        try:
            held = stack.enter_context(locked(path, wait=False))
        except BlockingIOError:
            console(f"data: waiting for another process that prepares the data ({path})")
            held = stack.enter_context(locked(path))
        yield held is not None
