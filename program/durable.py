"""Files that appear under their name complete or not at all: write beside, fsync, rename."""

import os
from pathlib import Path


def replace_file(path: Path, data: bytes, *, suffix: str = ".partial", durable: bool = True) -> None:
    """Write ``data`` to ``path`` + ``suffix`` and rename it: a reader sees the old content or all of the new.

    suffix: of the unfinished file. Processes that may write the same path at the same time need one each.
    durable: fsync the file before the rename and its folder after it, so that both survive a loss of power. Costs one
    to 20 ms on a local disk.

    Raises OSError; the unfinished file is removed then, and ``path`` is as it was.
    """
    partial = path.with_name(path.name + suffix)
    try:
        with partial.open("wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make names in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
