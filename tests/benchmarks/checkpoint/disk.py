"""The yardsticks: what the disk does with the same bytes in one large file."""

import os
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

BLOCK = "16M"


def random_file(path: Path, size: int) -> Path:
    """A file of ``size`` bytes that no file system can shorten. Put it where reading costs nothing, in memory."""
    with path.open("wb") as file:
        for start in range(0, size, 1 << 24):
            file.write(os.urandom(min(1 << 24, size - start)))
    return path


def write_s(source: Path, target: Path) -> float:
    """Seconds of dd from ``source`` into a new file, until it is on the disk (conv=fsync)."""
    target.unlink(missing_ok=True)
    began = time.perf_counter()
    _dd(source, target, "conv=fsync")
    return time.perf_counter() - began


def read_s(path: Path) -> float:
    """Seconds of dd of a file that is not in memory."""
    forget([path])
    began = time.perf_counter()
    _dd(path, Path("/dev/null"))
    return time.perf_counter() - began


def forget(paths: Iterable[Path]) -> None:
    """Drop files from the page cache, once they are on the disk (posix_fadvise(2)). A disk's own cache stays."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _dd(source: Path, target: Path, *more: str) -> None:
    command = ["dd", f"if={source}", f"of={target}", f"bs={BLOCK}", "status=none", *more]
    subprocess.run(command, check=True)
