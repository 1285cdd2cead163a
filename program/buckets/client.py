"""What is done with objects: facts, listings, reads, writes, deletions. What may pass by itself is tried again."""

import asyncio
import contextlib
import functools
import io
import itertools
import math
import os
import random
import secrets
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from program.buckets import names
from program.buckets.faults import ShortRead, fault
from program.errors import UserError

PATIENCE = "TRIPLANE_BUCKET_PATIENCE_S"
"""In the environment: seconds for which an object is tried again, before an error is one."""
PATIENCE_S = 120.0
_has_answered = False
"""Whether a server has, in this process: then one that cannot be reached is away for a moment, and no wrong address."""
FIRST_WAIT_S, MOST_WAIT_S = 0.5, 20.0
ATTEMPTS = 4
"""Of one request, by botocore, so that a part of an upload that fails does not take the others with it."""
CONNECT_S, READ_S = 10, 60
"""How long a server may take to answer, and to send the next bytes."""
PART_BYTES, PARTS_AT_ONCE = 8 << 20, 4
"""Of a multipart upload; S3 takes 10,000 parts of 5 MiB to 5 GiB (AWS, Amazon S3 multipart upload limits)."""
MOST_PARTS = 9_000


@dataclass(frozen=True, slots=True)
class ObjectFacts:
    """An object as a server describes it."""

    url: str
    size: int
    """Bytes."""
    etag: str
    """Another one for other content; what is made of it is the server's business. Hub files: of their blob."""
    changed_ns: int
    """Time of its last change."""


def tried[T](url: str, what: str, act: Callable[[], T]) -> T:
    """What ``act`` gives; tried again while its error may pass, after random waits that grow ("full jitter": Brooker,
    Exponential Backoff And Jitter, AWS Architecture Blog, 2015), for PATIENCE_S in all.

    Raises OSError as `faults.fault` has it.
    """
    global _has_answered
    deadline = math.inf
    for attempt in itertools.count():
        try:
            found_there = act()
            _has_answered = True
            return found_there
        except Exception as error:
            found = fault(error, url, what, _has_answered)
            if not attempt:  # what went before was no failure, as the hours of a large upload
                deadline = time.monotonic() + float(os.environ.get(PATIENCE) or PATIENCE_S)
            wait_s = random.uniform(0, min(MOST_WAIT_S, FIRST_WAIT_S * 2**attempt))
            if not found.passing or time.monotonic() + wait_s > deadline:
                raise found.error from None
            time.sleep(wait_s)
    raise AssertionError


_making = threading.RLock()
os.register_at_fork(before=_making.acquire, after_in_parent=_making.release, after_in_child=_making.release)


def filesystem(url: str) -> Any:
    """fsspec's file system of a URL, made once in a process. Raises UserError where its package is missing."""
    try:
        with _making:  # functools.cache alone would have threads that come at once make one each
            return _made(names.scheme(url), os.getpid())
    except ImportError:
        raise UserError(f"{url} needs `pip install {names.EXTRAS[names.scheme(url)]}`.") from None


@functools.cache
def _made(scheme: str, process: int) -> Any:
    """process: one that was made before a fork is the parent's."""
    import fsspec

    common = {"use_listings_cache": False, "skip_instance_cache": True}
    if scheme == "hf":
        return fsspec.filesystem(scheme, **common)
    loop = _event_loop()
    if scheme == "gs":
        return fsspec.filesystem(scheme, loop=loop, **common)
    retries = {"mode": "standard", "total_max_attempts": ATTEMPTS}
    # Over http as over https, where botocore does not sign content: SHA-256 took a fifth of an upload's time, and a
    # checksum that the server compares (CRC32) goes with it.
    of_s3 = {"payload_signing_enabled": False}
    settings = {"connect_timeout": CONNECT_S, "read_timeout": READ_S, "retries": retries, "max_pool_connections": 64,
                "s3": of_s3}  # fmt: skip
    found = fsspec.filesystem(scheme, loop=loop, config_kwargs=settings, **common)
    found.retries = 1  # s3fs' own have no jitter and a list of errors of their own; botocore and `tried` do it
    return found


def _event_loop() -> asyncio.AbstractEventLoop:
    """A loop in a thread, on poll(2). fsspec's own is on epoll(7), whose state a forked process shares: when that lets
    go of the connections that it inherited, the parent never hears of them again, and waits for ever.
    """
    loop = asyncio.SelectorEventLoop(selectors.PollSelector())
    threading.Thread(target=loop.run_forever, name="buckets", daemon=True).start()
    return loop


def facts(url: str) -> ObjectFacts:
    """Of one object. Raises FileNotFoundError, or another OSError."""
    return tried(url, "look up", lambda: _facts(url, filesystem(url).info(names.bare(url))))


def _facts(url: str, info: dict[str, Any]) -> ObjectFacts:
    if info.get("type") != "file":
        raise FileNotFoundError(url)
    etag = info.get("ETag") or info.get("etag") or info.get("generation") or info.get("blob_id") or ""
    changed = info.get("LastModified") or info.get("updated") or info.get("mtime")
    if isinstance(changed, str):
        changed = datetime.fromisoformat(changed)
    changed_ns = int(changed.timestamp() * 1e9) if isinstance(changed, datetime) else 0
    return ObjectFacts(url, int(info["size"]), str(etag).strip('"'), changed_ns)


def listed(prefix: str) -> list[ObjectFacts]:
    """All objects whose URL begins with ``prefix``, by name; none where there are none. Raises OSError."""
    folder, _, begin = names.bare(prefix).rpartition("/")
    options = {"prefix": begin} if begin and names.scheme(prefix) != "hf" else {}

    def find() -> dict[str, dict[str, Any]]:
        try:
            return filesystem(prefix).find(folder, detail=True, **options)
        except FileNotFoundError as error:
            if error.__cause__ is not None and "NoSuchBucket" in type(error.__cause__).__name__:
                raise
            return {}

    return [one for one in _files(prefix, find) if one.url.startswith(prefix)]


def globbed(pattern: str) -> list[ObjectFacts]:
    """All objects that fit a glob, "**" for any number of folders, by name. Raises OSError."""
    return _files(pattern, lambda: filesystem(pattern).glob(names.bare(pattern), detail=True))


def _files(url: str, find: Callable[[], dict[str, dict[str, Any]]]) -> list[ObjectFacts]:
    found = sorted(tried(url, "list", find).items())
    return [_facts(f"{names.scheme(url)}://{name}", info) for name, info in found if info["type"] == "file"]


def read(url: str, most_bytes: int) -> bytes:
    """All of a small object. Raises OSError, and UserError for one of more than ``most_bytes``."""
    found = facts(url)
    if found.size > most_bytes:
        raise UserError(f"{url}: expected at most {most_bytes:,} bytes, found {found.size:,}.")
    return opened(found).read_range(0, found.size) if found.size else b""


class ObjectFile(io.RawIOBase):
    """An object's bytes from any position: a read is one request, of that content and no other's."""

    def __init__(self, of: ObjectFacts) -> None:
        self.facts = of
        self._position = 0
        self._handle: Any = None

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """As of a file."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.facts.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer, or less at the end. Raises OSError; ESTALE where the object was replaced."""
        view = memoryview(buffer).cast("B")
        stop = min(self._position + len(view), self.facts.size)
        if stop <= self._position:
            return 0
        data = self.read_range(self._position, stop)
        view[: len(data)] = data
        self._position = stop
        return len(data)

    def read_range(self, start: int, stop: int) -> bytes:
        """Bytes ``start`` to ``stop``, all of them."""
        return tried(self.facts.url, f"read bytes {start} to {stop}", lambda: self._range(start, stop))

    def _range(self, start: int, stop: int) -> bytes:
        if self._handle is None:  # kept whatever happens: each of its reads is a request of its own
            self._handle = self._opened()
        data: bytes = self._handle._fetch_range(start, stop)  # no position, so that threads may share it
        if len(data) != stop - start:
            raise ShortRead(f"{len(data)} of {stop - start} bytes")
        return data

    def _opened(self) -> Any:
        """What it says of the object must be what was found at first."""
        handle = filesystem(self.facts.url).open(names.bare(self.facts.url), "rb", cache_type="none")
        now = _facts(self.facts.url, handle.details)
        if (now.size, now.etag) != (self.facts.size, self.facts.etag):
            raise FileExpired(f"the object is another since: {now.size} bytes, {now.etag}")
        return handle


class FileExpired(Exception):
    """Another object has the name. The class that s3fs raises has this name, too."""


def opened(of: ObjectFacts) -> ObjectFile:
    """For reading."""
    return ObjectFile(of)


def write(url: str, data: bytes) -> None:
    """Put a small object there, whatever there was. Raises OSError."""
    tried(url, "write", lambda: filesystem(url).pipe_file(names.bare(url), data))


def check_writable(prefix: str) -> None:
    """Put a small object behind a prefix and delete it, before hours of work. Raises OSError."""
    probe = f"{prefix}.probe-{secrets.token_hex(4)}"
    write(probe, b"x")
    remove([probe])


def create(url: str, data: bytes) -> bool:
    """Put a small object there if there is none (If-None-Match: *): whether it was put. Raises OSError.

    What was put though its answer was lost is found by what it holds.
    """
    try:
        tried(url, "create", lambda: filesystem(url).pipe_file(names.bare(url), data, mode="create"))
    except FileExistsError:
        return facts(url).size == len(data) and read(url, len(data)) == data
    return True


def remove(urls: Sequence[str]) -> None:
    """Delete objects, in this order; those that are gone already are no error. Raises OSError."""
    for url in urls:
        with contextlib.suppress(FileNotFoundError):
            tried(url, "delete", lambda one=url: filesystem(one).rm_file(names.bare(one)))  # type: ignore[misc]
