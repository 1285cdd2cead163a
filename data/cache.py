"""Folders made once: built under a lock and a temporary name, renamed when they are whole."""

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from data.config import DataConfig
from parallel.errors import UserError

Console = Callable[[str], None]
NO_ROOM = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR)
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # Lustre without -o flock, some NFS servers


def root(config: DataConfig) -> Path:
    """`data.cache_dir`, or the user's cache folder."""
    if config.cache_dir is not None:
        return Path(config.cache_dir).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("triplane"))


def build_once(target: Path, is_whole: Callable[[Path], bool], build: Callable[[Path], None], console: Console) -> None:
    """Make sure that folder `target` exists and `is_whole`; else `build` it, in one process at a time.

    A whole folder is used without a lock and without writing, so a read-only cache works. A build that is
    killed leaves a temporary folder that nothing reads and the next build removes. Where the file system has
    no locks, several processes may build the same thing and one of them wins.
    Raises UserError where the cache cannot be written.
    """
    if is_whole(target):
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target, console) as is_locked:
            if not is_whole(target):
                if is_locked:
                    _remove_leftovers(target)
                _build(target, is_whole, build)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise UserError(
            f"data.cache_dir: cannot write below {target.parent}: {error.strerror}. Name another folder with "
            "data.cache_dir."
        ) from error


def _build(target: Path, is_whole: Callable[[Path], bool], build: Callable[[Path], None]) -> None:
    part = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}")
    part.mkdir()
    try:
        build(part)
        _sync_files(part)
        if target.exists() and not is_whole(target):
            shutil.rmtree(target)
        try:
            part.rename(target)
        except OSError:  # without locks another process may have been faster
            if not is_whole(target):
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _sync_files(folder: Path) -> None:
    """Put the files on disk before the folder gets its name: a power cut must not leave it half empty."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _remove_leftovers(target: Path) -> None:
    for path in target.parent.glob(f".{target.name}.*"):
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _lock(target: Path, console: Console) -> Iterator[bool]:
    """Hold the lock of `target`, which the system drops with its process; False where there are no locks."""
    with target.with_name(f"{target.name}.lock").open("ab") as file:
        yield _acquire(file, console)


def _acquire(file: BinaryIO, console: Console) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        console(f"data: waiting for another process that prepares the data ({file.name})")
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return False
    return True
