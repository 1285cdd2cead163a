"""Whether a folder can take a checkpoint: free space, free names, permission."""

import contextlib
import errno
import os
import resource
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from program.durable import replace_file
from training.checkpoint import folders


def problem(root: Path, needed_bytes: int, needed_files: int) -> str | None:
    """What stands in the way of a checkpoint of this size in ``root``, and what to do; None where nothing does."""
    if text := save_problem(root):
        return text
    try:
        return lack(root, needed_bytes, needed_files)
    except OSError as error:
        return f"checkpoints cannot be written to {root}: {error.strerror}. Use another --run_dir."


def save_problem(root: Path) -> str | None:
    """Why checkpoints cannot be saved in ``root``, tried in small; None where they can.

    A live run that begins a checkpoint there removes what starts have left, this probe too: then once more.
    """
    for more in (3, 2, 1, 0):
        try:
            _probe(root)
            return None
        except OSError as error:
            if more and isinstance(error, FileNotFoundError):
                continue
            advice = "Make room or give permission there, or use another --run_dir"
            return f"checkpoints cannot be written to {root}: {reason(error)}. {advice}."
    return None


def _probe(root: Path) -> None:
    """The steps of a save, in small; nothing of them stays."""
    root.mkdir(parents=True, exist_ok=True)
    probe = root / f"{folders.PROBE}{secrets.token_hex(4)}"
    renamed, probed_latest = probe.with_name(f"{probe.name}-renamed"), probe.with_name(f"{probe.name}-latest")
    try:
        probe.mkdir()
        replace_file(probe / "file", b"x")
        probe.rename(renamed)
        replace_file(probed_latest, b"x")
    finally:
        for left in (probe, renamed):
            shutil.rmtree(left, ignore_errors=True)
        probed_latest.unlink(missing_ok=True)


def file_size_problem(needed_bytes: int) -> str | None:
    """Whether this process may write a file of that size (``ulimit -f``)."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit == resource.RLIM_INFINITY or needed_bytes <= limit:
        return None
    return (
        f"a rank's part of a checkpoint takes {needed_bytes:,} bytes, but this process may write files of "
        f"{limit:,} at most. Raise the limit: ulimit -f unlimited"
    )


def reason(error: OSError) -> str:
    """What the system says, and of which file."""
    return f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}"


def lack(root: Path, needed_bytes: int, needed_files: int) -> str | None:
    """The space or the names that ``root`` lacks for a checkpoint of this size; None where there are enough."""
    free = os.statvfs(nearest(root))
    available = free.f_bavail * free.f_frsize
    if available < needed_bytes:
        return (
            f"a checkpoint takes {needed_bytes:,} bytes, but {root} has {available:,} free. Make room, "
            "lower checkpoint.keep, or use another --run_dir."
        )
    if free.f_files and free.f_favail < needed_files:
        return (
            f"a checkpoint takes {needed_files:,} files, but {root} can take {free.f_favail:,} more (inodes). Delete "
            "files there, or use another --run_dir."
        )
    return None


def is_full(root: Path, needed_bytes: int, needed_files: int, text: str) -> bool:
    """Whether a save that failed with ``text`` failed for want of room, so that older checkpoints are in its way.

    The text counts, too: of a quota statvfs(3) tells nothing, and what failed has been removed by now.
    """
    if any(os.strerror(number) in text for number in (errno.ENOSPC, errno.EDQUOT)):
        return True
    with contextlib.suppress(OSError):
        return lack(root, needed_bytes, needed_files) is not None
    return False


def nearest(path: Path) -> Path:
    """``path``, or the folder nearest to it that exists."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())


@contextlib.contextmanager
def explain_full_disk(path: Path, needed_bytes: int) -> Iterator[None]:
    """Around the writing of ``path``: an OSError is raised with that name, what it takes, and what is free.

    write(2) and fsync(2) name none of them, and the message has to say which disk and how much.
    """
    try:
        yield
    except OSError as error:
        there = os.statvfs(nearest(path))
        free = f"{there.f_bavail * there.f_frsize:,} bytes, {there.f_favail:,} files"
        place = f", {error.filename}" if error.filename else ""
        text = f"{error.strerror or error}{place} (it takes {needed_bytes:,} bytes; free there: {free})"
        raise OSError(error.errno, text, str(path)) from error
