"""A bucket on a real server behind a proxy that fails as it is asked to, and what is in it, seen by processes of their
own: the campaign's own one, which forks all others, never opens a connection."""

import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from program.buckets import client
from program.processes import start_of
from tests.faults.processes import Process, command_of
from tests.support import buckets
from tests.support.buckets import BUCKET, Failure, Request, Server
from training.checkpoint import folders
from training.checkpoint.bucket import process, stored
from training.checkpoint.bucket.uploading import UploadOrder
from training.checkpoint.format.verify import damages
from training.checkpoint.lineage import read_commit

FAILURES: tuple[Failure, ...] = get_args(Failure)
LIMIT_S = 90.0


@dataclass(kw_only=True, frozen=True)
class BucketScene:
    """Where the bucket is, and which requests fail."""

    scratch: Path
    server: Server
    """The proxy."""

    @property
    def rule(self) -> Path:
        """A file for the proxy: failures, and the share of requests that each meets."""
        return self.scratch / "rule"

    @property
    def log(self) -> Path:
        """A line for each request: its failure or "-", method and path."""
        return self.scratch / "requests"

    def fail(self, shares: Mapping[str, float] = MappingProxyType({})) -> None:
        """From the next request on."""
        written = self.rule.with_suffix(".new")
        written.write_text(json.dumps(dict(shares)))
        written.replace(self.rule)

    def url(self, name: str) -> str:
        """A run's prefix."""
        return f"s3://{BUCKET}/{name}"


@contextlib.contextmanager
def scene(scratch: Path, server_of: Callable[[Path], AbstractContextManager[Server]]) -> Iterator[BucketScene]:
    """A server and the proxy, each in a process of its own."""
    with server_of(scratch / "server") as server:
        endpoint = scratch / "endpoint"
        unproxied = BucketScene(scratch=scratch, server=server)
        unproxied.fail()
        pid = forked(lambda: _proxy(unproxied, endpoint), scratch / "proxy.log")
        try:
            while not endpoint.exists():
                time.sleep(0.05)
            found = dataclasses.replace(unproxied, server=Server(endpoint.read_text(), pid))
            os.environ |= found.server.environment | {client.PATIENCE: "2"}
            yield found
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _proxy(scene: BucketScene, endpoint: Path) -> int:
    draw = random.Random(1)

    def judged(request: Request) -> Failure | None:
        shares = json.loads(scene.rule.read_text())
        found = next((one for one in FAILURES if draw.random() < shares.get(one, 0.0)), None)
        if found and not _fits(found, request):
            found = None
        log.write(f"{found or '-'} {request.method} {request.path}\n".encode())
        return found

    with scene.log.open("ab", buffering=0) as log, buckets.proxied(scene.server, judged) as (before, _):
        written = endpoint.with_suffix(".new")
        written.write_text(before.endpoint)
        written.replace(endpoint)
        signal.pause()
    return 0


def _fits(failure: Failure, request: Request) -> bool:
    """Whether it makes a difference."""
    if failure == "stale":
        return request.is_listing
    return failure != "short" or (request.method == "GET" and not request.is_listing)


def forked(act: Callable[[], int], log: Path, stdin: int | None = None) -> int:
    """``act`` in a process of its own, whose stdout is ``log``: its pid."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        client.ATTEMPTS, client.FIRST_WAIT_S, client.PART_BYTES = 1, 0.05, 5 << 20
        file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY) if stdin is None else stdin, 0)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  (pytest has another one)
        for number in process.NOT_FOR_US:
            signal.signal(number, signal.SIG_DFL)
        code = act()
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def uploader(order: UploadOrder, log: Path) -> tuple[int, int]:
    """The program beside a node's first rank, asked to say when the newest is there: its pid, and its stdin."""
    read, write = os.pipe()

    def run() -> int:
        os.close(write)
        sys.argv = ["process", json.dumps({name: getattr(order, name) for name in order.__slots__})]
        return process.main()

    pid = forked(run, log, read)
    os.close(read)
    os.write(write, b"look\n")
    return pid, write


def uploaders(url: str) -> list[Process]:
    """Programs that upload there."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        words = command_of(int(folder.name))
        if "checkpoint.bucket.process" in words and json.dumps(url) in words:
            found.append(Process(int(folder.name), start_of(int(folder.name))))
    return found


def asked(scratch: Path, question: Callable[[], Any]) -> Any:
    """What a process of its own answers, in JSON."""
    answer = scratch / "answer.json"
    answer.unlink(missing_ok=True)

    def act() -> int:
        answer.write_text(json.dumps(question()))
        return 0

    pid = forked(act, scratch / "asked.log")
    _, status = os.waitpid(pid, 0)
    if status or not answer.exists():
        raise RuntimeError((scratch / "asked.log").read_text()[-2000:])
    return json.loads(answer.read_text())


@dataclass(kw_only=True, frozen=True)
class BucketContents:
    """What is in the bucket."""

    newest: int
    """The iteration that a start would go on from; 0: none."""
    complete: list[str]
    """Names of folders with a manifest."""
    incomplete: list[str]
    files: dict[str, int]
    """How many objects each folder has."""
    damaged: list[str]
    """What is wrong with complete ones, which are downloaded."""


def contents(url: str, scratch: Path) -> BucketContents:
    """Seen by a process of its own."""

    def look() -> dict[str, Any]:
        found = stored.stored(stored.root_of(url))
        damaged = []
        for one in found:
            if one.is_complete:
                folder = scratch / "seen"
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                stored.fetched(one, folder, one.files)
                damaged += [f"{one.name}: {damage.text}" for damage in damages(folder, "hashes")]
        newest = stored.newer(None, url)
        return {
            "newest": newest[0].iteration if newest else 0, "damaged": damaged,
            "complete": [one.name for one in found if one.is_complete],
            "incomplete": [one.name for one in found if not one.is_complete],
            "files": {one.name: len(one.files) for one in found},
        }  # fmt: skip

    return BucketContents(**asked(scratch, look))


def stored_name(path: Path) -> str:
    """Of a local checkpoint's folder in the bucket."""
    return stored.name_of(path, read_commit(path, folders.iteration_of(path) or 0).hash)
