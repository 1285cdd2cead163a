"""Blocks of objects on this machine's disk: what shards in a bucket are read through.

`FOLDER/blocks/OBJECT/NUMBER` holds one block and, behind it, its hash, which is checked when a process reads the block
first: what a power cut or a disk made of it is fetched again. OBJECT is a digest of URL, size and ETag, so that an
object that is replaced has other blocks. All processes of a machine share the folder; a block that several want is
fetched once. Where the cache is fuller than it may be, the blocks that were first read longest ago go; a process that
is reading one keeps it until it is done, and fetches it again when it wants it next.
"""

import contextlib
import hashlib
import itertools
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import xxhash

from data.block_map import BlockMap
from program.buckets import client
from program.buckets.client import ObjectFacts
from program.durable import replace_file
from program.errors import UserError
from program.locks import locked

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
        self.threads = ThreadPoolExecutor(FETCHES_AT_ONCE, thread_name_prefix="blocks")
        """What fetches ahead. Threads do not survive a fork: only ranks ask, and none is forked from one that has."""
        self.mapped = list[BlockMap]()
        """The map of each block that this process has mapped."""
        self._fetched = itertools.count(1)
        self._reading, self._depth = threading.RLock(), 0

    def __enter__(self) -> None:
        """Within, ids that objects ``have`` may be read: by one thread at a time, and nothing is unmapped."""
        self._reading.acquire()
        self._depth += 1
        if self._depth == 1 and len(self.mapped) > MOST_MAPPED:
            for one in set(self.mapped):
                one.clear()
            self.mapped.clear()

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        self._reading.release()

    def make_room(self) -> None:
        """After a block was fetched: each EVICT_EVERY remove the oldest blocks beyond the limit; one process of a
        machine at a time, others go on."""
        if next(self._fetched) % EVICT_EVERY:
            return
        with contextlib.suppress(BlockingIOError), locked(self.copies / "evict.lock", wait=False):
            self._evict()

    def _evict(self) -> None:
        found: list[tuple[int, int, str]] = []
        for folder, _, names in os.walk(self.folder):  # a Path of each of 100,000 would take as long again
            for path in (f"{folder}/{name}" for name in names):
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(path)  # noqa: PTH116
                    found.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in found)
        most = total if total <= self.limit_bytes else self.limit_bytes * LEFT
        for _, size, path in sorted(found):
            if total <= most:
                return
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # noqa: PTH108
            total -= size


class BlockTokens:
    """Ids of an object: as an array of them is read, a slice at a time, block by block through the cache. For any
    number of threads of one process."""

    def __init__(self, cache: BlockCache, of: ObjectFacts, dtype: np.dtype) -> None:
        self.cache, self.of, self.dtype = cache, of, np.dtype(dtype)
        self.map = BlockMap(of.size, BLOCK_BYTES)
        self.array = self.map.bytes.view(dtype)
        """All ids; only what ``have`` was asked for may be read, within ``cache``."""
        self._in_block = BLOCK_BYTES // self.dtype.itemsize
        known = f"{of.url}\0{of.size}\0{of.etag}\0{BLOCK_BYTES}"
        self._folder = cache.folder / hashlib.blake2b(known.encode(), digest_size=12).hexdigest()
        self._coming: dict[int, Future[None]] = {}
        """Blocks that threads fetch ahead."""
        self._mine = threading.local()

    def __getitem__(self, part: slice) -> np.ndarray:
        """A copy of ids [stop - start]. Raises UserError where they cannot be fetched."""
        if part.stop <= part.start:
            return np.empty(0, self.dtype)
        with self.cache:
            self.have(np.array([part.start]), part.stop - part.start)
            return self.array[part].copy()

    def have(self, starts: np.ndarray, count: int) -> None:
        """Have ``count`` ids from each of ``starts`` [n] on, or as many as there are. Raises UserError as ``[]``."""
        firsts = starts // self._in_block
        if count <= self._in_block and 0 not in self.map.with_next[firsts].tobytes():  # all() takes three times as long
            return
        lasts = (np.minimum(starts + count, len(self.array)) - 1) // self._in_block
        spans = zip(firsts.tolist(), lasts.tolist(), strict=True)
        for number in sorted({number for first, last in spans for number in range(first, last + 1)}):
            if not self.map.is_mapped[number]:
                self._put(number)

    def ask_for(self, start: int, stop: int) -> None:
        """Have the blocks of ids ``start`` to ``stop`` fetched. Returns at once; errors are said by ``have``."""
        for number in range(start // self._in_block, -(-stop // self._in_block)):
            if not self.map.is_mapped[number] and number not in self._coming:
                self._coming[number] = self.cache.threads.submit(self._bring, number)

    def _put(self, number: int) -> None:
        coming = self._coming.pop(number, None)
        # Waits for it; what failed then may pass now, and is said here if it does not.
        if coming is None or coming.exception() is not None:
            self._bring(number)
        while not self.map.is_mapped[number]:
            try:
                with open(self._path(number), "rb", buffering=0) as file:  # noqa: PTH123
                    self.map.put(number, file.fileno())
            except FileNotFoundError:  # another process has made room
                self._bring(number)
        self.cache.mapped.append(self.map)

    def _bring(self, number: int) -> None:
        """Have a block on the disk, whole: found there, or fetched by one of all processes and threads. Where one waits
        while another removes the lock, and where the file system has none, it is fetched twice, and is the same."""
        if self._is_whole(number):
            return
        path = self._path(number)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with locked(lock := Path(f"{path}.lock"), needed=False):
                try:
                    if not self._is_whole(number):
                        data, suffix = self._read(number), f".tmp-{os.getpid()}-{threading.get_ident()}"
                        replace_file(Path(path), data + xxhash.xxh3_64_digest(data), suffix=suffix, durable=False)
                finally:
                    lock.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(
                f"data: {self._folder}: {error.strerror}; the blocks of {self.of.url} are kept there. Make room, lower "
                "data.bucket_cache_gb, or name another folder with data.cache_dir."
            ) from None
        self.cache.make_room()

    def _is_whole(self, number: int) -> bool:
        try:
            with open(self._path(number), "rb", buffering=0) as file:  # noqa: PTH123
                data = file.read()
        except FileNotFoundError:
            return False
        with contextlib.suppress(OSError):  # removed meanwhile, or another user's
            os.utime(self._path(number))
        content, digest = data[:-HASH_BYTES], data[-HASH_BYTES:]
        return len(content) == self._size(number) and xxhash.xxh3_64_digest(content) == digest

    def _read(self, number: int) -> bytes:
        if getattr(self._mine, "pid", 0) != os.getpid():
            self._mine.file, self._mine.pid = client.opened(self.of), os.getpid()
        try:
            start = number * BLOCK_BYTES
            data: bytes = self._mine.file.read_range(start, start + self._size(number))
        except OSError as error:
            raise UserError(f"data: {self.of.url}: {error.strerror}.") from None
        return data

    def _path(self, number: int) -> str:
        return f"{self._folder}/{number:07d}"

    def _size(self, number: int) -> int:
        return min(BLOCK_BYTES, self.of.size - number * BLOCK_BYTES)
