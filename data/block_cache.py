"""Blocks of objects on this machine's disk: what shards in a bucket are read through.

`FOLDER/blocks/OBJECT/NUMBER` holds one block and, behind it, its hash, which is checked when a process reads the block
first: what a power cut or a disk made of it is fetched again. OBJECT is a digest of URL, size and ETag, so that an
object that is replaced has other blocks. All processes of a machine share the folder; a block that several want is
fetched once. Where the cache is fuller than it may be, the blocks that were first read longest ago go; a process that
is reading one keeps it until it is done, and fetches it again when it wants it next.
"""

import contextlib
import fcntl
import hashlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import xxhash

from data.block_map import BlockMap
from program.buckets import client
from program.buckets.client import ObjectFacts
from program.errors import UserError

BLOCK_BYTES = 1 << 20
"""What is fetched at once. Windows are read at random: larger blocks would have a first step wait for more of a shard,
smaller ones would ask a bucket more often, which is slower and costs money (docs/buckets.md)."""
FETCHES_AT_ONCE = 16
"""By one process; a request to S3 takes tens of milliseconds, however small it is."""
EVICT_EVERY = 64
"""Blocks that a process fetches between looks at how full the cache is."""
LEFT = 0.9
"""Of the limit, where blocks had to go."""
HASH_BYTES = 8
MOST_MAPPED = 4096
"""Blocks mapped by a process, which take room on the disk even when they have been removed; Linux allows 65,530
mappings of a process (vm.max_map_count)."""


class BlockCache:
    """Blocks of any number of objects in one folder, of at most ``limit_bytes`` and what the last look missed."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.copies, self.folder, self.limit_bytes = folder, folder / "blocks", limit_bytes
        self._since_look, self._lock = 0, threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._pid = 0
        self._reading, self._depth = threading.RLock(), 0
        self._mapped, self._mapped_blocks = set[CachedObject](), 0
        """Objects of which this process has blocks mapped, and how many."""

    def object_folder(self, of: ObjectFacts) -> Path:
        """Where the blocks of an object lie."""
        known = f"{of.url}\0{of.size}\0{of.etag}\0{BLOCK_BYTES}"
        return self.folder / hashlib.blake2b(known.encode(), digest_size=12).hexdigest()

    def threads(self) -> ThreadPoolExecutor:
        """What fetches ahead, in this process: threads do not survive a fork."""
        if self._threads is None or self._pid != os.getpid():
            self._threads, self._pid = ThreadPoolExecutor(FETCHES_AT_ONCE, thread_name_prefix="blocks"), os.getpid()
        return self._threads

    def __enter__(self) -> None:
        """Within, bytes that objects ``have`` may be read: by one thread at a time, and nothing is unmapped."""
        self._reading.acquire()
        self._depth += 1
        if self._depth == 1 and self._mapped_blocks > MOST_MAPPED:
            for one in self._mapped:
                one.forget()
            self._mapped.clear()
            self._mapped_blocks = 0

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        self._reading.release()

    def mapped(self, by: "CachedObject") -> None:
        """A block was mapped."""
        self._mapped.add(by)
        self._mapped_blocks += 1

    def added(self) -> None:
        """A block was fetched: look from time to time whether others must go."""
        with self._lock:
            self._since_look += 1
            if self._since_look < EVICT_EVERY:
                return
            self._since_look = 0
        self.evict()

    def evict(self) -> None:
        """Remove the oldest blocks beyond the limit; one process of a machine at a time, others go on."""
        with (self.folder / "evict.lock").open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return
            found = sorted(self._blocks())
            total = sum(size for _, size, _ in found)
            if total <= self.limit_bytes:
                return
            for _, size, path in found:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)  # noqa: PTH108  a Path of each of 100,000 would take as long again
                total -= size
                if total <= self.limit_bytes * LEFT:
                    return

    def _blocks(self) -> Iterator[tuple[int, int, str]]:
        """(time of change, bytes, path) of every block."""
        for folder in os.scandir(self.folder):
            if folder.is_dir():
                for entry in os.scandir(folder):
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat()
                        yield status.st_mtime_ns, status.st_size, entry.path


class CachedObject:
    """An object's bytes, block by block through the cache. For any number of threads of one process."""

    def __init__(self, cache: BlockCache, of: ObjectFacts) -> None:
        self.of, self.cache, self._folder = of, cache, cache.object_folder(of)
        self.map = BlockMap(of.size, BLOCK_BYTES)
        self._coming: dict[int, Future[None]] = {}
        """Blocks that threads fetch ahead. Only ranks ask, and none is forked from one that has."""
        self._lock, self._mine = threading.Lock(), threading.local()

    def have(self, starts: np.ndarray, length: int) -> None:
        """Have ``length`` bytes from each of ``starts`` [n] on, or as many as there are.

        Raises UserError where they cannot be fetched.
        """
        lasts = (np.minimum(starts + length, self.of.size) - 1) // BLOCK_BYTES
        spans = zip((starts // BLOCK_BYTES).tolist(), lasts.tolist(), strict=True)
        wanted = {number for first, last in spans for number in range(first, last + 1)}
        for number in sorted(number for number in wanted if not self.map.is_mapped[number]):
            self._put(number)

    def forget(self) -> None:
        """Let go of all blocks."""
        self.map.clear()

    def ask_for(self, start: int, stop: int) -> None:
        """Have the blocks of bytes ``start`` to ``stop`` fetched. Returns at once; errors are said by ``have``."""
        for number in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
            if not self.map.is_mapped[number]:
                with self._lock:
                    if number not in self._coming:
                        self._coming[number] = self.cache.threads().submit(self._bring, number)

    def _put(self, number: int) -> None:
        with self._lock:
            coming = self._coming.pop(number, None)
        # Waits for it; what failed then may pass now, and is said here if it does not.
        is_there = coming is not None and coming.exception() is None
        while True:
            if not is_there:
                self._bring(number)
            is_there = False
            try:
                descriptor = os.open(self._path(number), os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:  # another process has made room
                continue
            try:
                self.map.put(number, descriptor)
                self.cache.mapped(self)
                return
            finally:
                os.close(descriptor)

    def _bring(self, number: int) -> None:
        """Have a block on the disk, whole: found there, or fetched."""
        if not self._is_whole(number):
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._only_one(number):
                if not self._is_whole(number):
                    self._fetch(number)

    def _is_whole(self, number: int) -> bool:
        try:
            with open(self._path(number), "rb", buffering=0) as file:  # noqa: PTH123  as above
                data = file.read()
        except FileNotFoundError:
            return False
        with contextlib.suppress(OSError):  # removed meanwhile, or another user's
            os.utime(self._path(number))
        return len(data) == self._size(number) + HASH_BYTES and _hash(data[:-HASH_BYTES]) == data[-HASH_BYTES:]

    def _fetch(self, number: int) -> None:
        start = number * BLOCK_BYTES
        if getattr(self._mine, "pid", 0) != os.getpid():
            self._mine.file, self._mine.pid = client.opened(self.of), os.getpid()
        try:
            data = self._mine.file.read_range(start, start + self._size(number))
        except OSError as error:
            raise UserError(f"data: {self.of.url}: {error.strerror}.") from None
        partial = f"{self._path(number)}.tmp-{os.getpid()}-{threading.get_ident()}"
        try:
            with open(partial, "wb") as file:  # noqa: PTH123  buffered: a raw write on a full disk may be cut short
                file.write(data + _hash(data))
            os.replace(partial, self._path(number))  # noqa: PTH105
        except OSError as error:
            raise UserError(
                f"data: {self._folder}: {error.strerror}; the blocks of {self.of.url} are kept there. Make room, lower "
                "data.bucket_cache_gb, or name another folder with data.cache_dir."
            ) from None
        self.cache.added()

    @contextlib.contextmanager
    def _only_one(self, number: int) -> Iterator[None]:
        """Of all processes and threads, but for one that waits while another removes the lock, and where the file
        system has none: then a block is fetched twice, and is the same."""
        descriptor = os.open(f"{self._path(number)}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self._path(number)}.lock")  # noqa: PTH108
            os.close(descriptor)

    def _path(self, number: int) -> str:
        return f"{self._folder}/{number:07d}"

    def _size(self, number: int) -> int:
        return min(BLOCK_BYTES, self.of.size - number * BLOCK_BYTES)


def _hash(data: bytes) -> bytes:
    return xxhash.xxh3_64_digest(data)
