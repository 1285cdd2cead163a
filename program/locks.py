"""Locks of files, which the system drops with the process that holds them."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # Lustre without -o flock, some NFS servers


@contextlib.contextmanager
def locked(path: Path, wait: bool = True, needed: bool = True) -> Iterator[int | None]:
    """Hold the lock of a file, which is made: its descriptor; None where the file system has no locks, or, of one that
    is not needed, where it fails.

    Raises BlockingIOError where another process has it, unless that is to be waited for.
    """
    # Without O_RDWR, a FIFO of that name would be waited for.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            found: int | None = descriptor
        except OSError as error:
            if needed and error.errno not in NO_LOCKS:
                raise
            found = None
        yield found
    finally:
        os.close(descriptor)
