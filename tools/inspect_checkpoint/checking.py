"""The files of a checkpoint against its manifest, hashed by several threads."""

import os
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from parallel.untrusted import read_text
from training.checkpoint.format.manifest import DamagedError, read_manifest
from training.checkpoint.format.verify import Damage, Depth, damages

MOST_THREADS = 8
"""xxhash and reads let go of Python's lock; a few threads are as fast as a disk."""


def check(folder: Path, depth: Depth) -> list[Damage]:
    """Every damage of a checkpoint, by file; on a terminal with a bar of the bytes read."""
    try:
        files = read_manifest(folder).files
    except DamagedError:
        return damages(folder, depth)
    shares = max(1, min(MOST_THREADS, os.cpu_count() or 1, len(files)))
    total = sum(facts.bytes for facts in files.values()) if depth == "hashes" else 0
    with bar(total, "hashing") as progress, ThreadPoolExecutor(shares) as pool:
        parts = [pool.submit(damages, folder, depth, (share, shares)) for share in range(shares)]
        _watch(parts, progress)
    return sorted({damage for part in parts for damage in part.result()})  # every share checks the names


@contextmanager
def bar(total_bytes: int, title: str) -> Iterator[Any]:
    """A progress bar by bytes on a terminal, nothing elsewhere."""
    hidden = not sys.stderr.isatty() or total_bytes == 0
    with tqdm(total=total_bytes, desc=title, unit="B", unit_scale=True, disable=hidden, leave=False) as progress:
        yield progress


def _watch(parts: list[Future[list[Damage]]], progress: Any) -> None:
    start, waiting = _bytes_read(), set(parts)
    while waiting:
        _, waiting = wait(waiting, timeout=0.2)
        progress.update(min(_bytes_read() - start, progress.total or 0) - progress.n)


def _bytes_read() -> int:
    """By this process so far, as the kernel counts (proc_pid_io(5)); 0 where it does not."""
    try:
        lines = read_text(Path("/proc/self/io")).splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("rchar:")))
    except (OSError, StopIteration, ValueError):
        return 0
