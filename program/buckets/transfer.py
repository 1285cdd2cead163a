"""Whole files into buckets and out of them, in parts, some at a time."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from program.buckets import client, names
from program.buckets.client import MOST_PARTS, PART_BYTES, PARTS_AT_ONCE, ObjectFacts, tried

Report = Callable[[int], object]
"""Gets bytes as they are through."""


def upload(path: Path, url: str, report: Report = lambda _: None) -> ObjectFacts:
    """A file as an object, by multipart upload where it is large: it is there as a whole or not at all.

    Takes PART_BYTES x PARTS_AT_ONCE of memory, more for files of over 75 GB. Raises OSError; also where the object
    that is there then has not the file's size.
    """
    size, known = path.stat().st_size, 0

    def progress(_: object, value: int, **__: object) -> None:
        nonlocal known
        report(max(0, value - known))  # another try begins at 0
        known = max(known, value)

    tried(url, "upload", lambda: _put(path, url, size, progress))
    found = client.facts(url)
    if found.size != size:
        raise OSError(5, f"upload: {found.size:,} bytes are there, expected {size:,}. Give the command again", url)
    progress(size, size)
    return found


def _put(path: Path, url: str, size: int, progress: Callable[..., None]) -> None:
    from fsspec.callbacks import Callback

    options: dict[str, object] = {"callback": Callback(hooks={"progress": progress})}
    if names.scheme(url) == "s3":
        options |= {"chunksize": max(PART_BYTES, -(-size // MOST_PARTS)), "max_concurrency": PARTS_AT_ONCE}
    client.filesystem(url).put_file(str(path), names.bare(url), **options)


def download(of: ObjectFacts, path: Path, report: Report = lambda _: None) -> None:
    """An object as a file at ``path``, which is there under this name when it is whole and on the disk.

    Raises OSError; the unfinished file is removed then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        with partial.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, of.size))
            os.ftruncate(file.fileno(), of.size)
            _fill(of, file.fileno(), report)
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _fill(of: ObjectFacts, descriptor: int, report: Report) -> None:
    file = client.opened(of)

    def part(start: int) -> None:
        stop = min(start + PART_BYTES, of.size)
        data = memoryview(file.read_range(start, stop))
        at = start
        while data:
            count = os.pwrite(descriptor, data, at)
            data, at = data[count:], at + count
        report(stop - start)

    with ThreadPoolExecutor(PARTS_AT_ONCE) as pool:
        for done in [pool.submit(part, start) for start in range(0, of.size, PART_BYTES)]:
            done.result()
