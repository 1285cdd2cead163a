"""The program beside a node's first rank: ``python -m training.checkpoint.bucket.process ORDER``.

It hears lines on stdin: "look" asks for ``idle`` as soon as the newest checkpoint is in the bucket; their end ends it.
It prints an ``UploadReport`` a line. What fails ends it, too: the rank starts it again, with connections and
credentials that are read again.
"""

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from program.errors import UserError
from program.processes import die_with_parent
from program.schema import Text
from program.untrusted import parse_json
from training.checkpoint import folders
from training.checkpoint.background.process import NOT_FOR_US
from training.checkpoint.bucket import uploading
from training.checkpoint.bucket.uploading import UploadOrder
from training.checkpoint.format.manifest import MANIFEST, DamagedError

POLL_S, REPORT_S = 1.0, 2.0


@dataclass(kw_only=True, slots=True, frozen=True)
class UploadReport:
    """What the program says."""

    what: Literal["sent", "uploaded", "failed", "idle"]
    name: Text = ""
    """Of the checkpoint."""
    bytes: int = 0
    """sent: since the last such report. uploaded: of all files."""
    left: int = 0
    """sent: bytes that this node has still to send."""
    seconds: float = 0.0
    text: Text = ""


def say(what: str, **facts: object) -> None:
    """An ``UploadReport``, to the rank."""
    print(json.dumps({"what": what, **facts}), flush=True)


def main() -> int:
    """Until the rank hangs up, or an upload fails."""
    for number in NOT_FOR_US:
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(os.getppid())
    order: UploadOrder = parse_json(sys.argv[1].encode(), UploadOrder)
    try:
        return first_node(order) if order.node == 0 else other_node(order)
    except (OSError, DamagedError, UserError) as error:
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        say("failed", text=text)
        return 1


def first_node(order: UploadOrder) -> int:
    """Decide what is uploaded, commit it, and keep retention's rule."""
    root, asked, now = Path(order.root), False, list[tuple[Path, int]]()
    seen: list[tuple[Path, int]] | None = None
    while (heard := _heard(POLL_S if now == seen else 0.0)) is not None:
        asked, now = asked or heard, _stamps(folders.complete(root))
        if now == seen and not asked:
            continue
        view = uploading.look(order)
        if not view.lacking:
            for one in view.removable:
                uploading.remove(order, one)
            seen = now
        if asked and view.newest not in view.lacking:
            say("idle")
            asked = False
        if view.lacking:
            path = view.lacking[0].path
            uploading.pin(root, path)
            _upload(order, path)
            uploading.pin(root, None)
    return 0


def other_node(order: UploadOrder) -> int:
    """Send this node's share of what the first one has chosen."""
    root, done = Path(order.root), list[tuple[Path, int]]()
    while _heard(POLL_S) is not None:
        now = _stamps([path] if (path := folders.uploading(root)) else [])
        if now and now != done:
            _upload(order, now[0][0])
            done = now
    return 0


def _stamps(paths: Iterable[Path]) -> list[tuple[Path, int]]:
    """What tells whether something was committed or deleted since."""
    found = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            found.append((path, (path / MANIFEST).stat().st_mtime_ns))
    return found


def _upload(order: UploadOrder, path: Path) -> None:
    """One checkpoint. Retention may take it away meanwhile: the next one is newer."""
    began = time.monotonic()
    try:
        sent = _Sent(path.name, uploading.share_bytes(order, path))
        size = uploading.upload(order, path, sent)
    except (OSError, DamagedError):
        if folders.is_complete(path):
            raise
        return
    sent.tell()
    say("uploaded", name=path.name, bytes=size, seconds=time.monotonic() - began)


class _Sent:
    """Counts bytes, which several threads send, and tells the rank now and then."""

    def __init__(self, name: str, left: int) -> None:
        self.name, self.left, self.sent, self.lock = name, left, 0, threading.Lock()
        self.tell()

    def __call__(self, count: int) -> None:
        with self.lock:
            self.left, self.sent = self.left - count, self.sent + count
            if time.monotonic() - self.said_s > REPORT_S:
                self.tell()

    def tell(self) -> None:
        say("sent", name=self.name, bytes=self.sent, left=self.left)
        self.sent, self.said_s = 0, time.monotonic()


def _heard(timeout_s: float) -> bool | None:
    """Whether the rank asks; None where it has hung up."""
    if not select.select([0], [], [], timeout_s)[0]:
        return False
    return bool(os.read(0, 1 << 10)) or None


if __name__ == "__main__":
    sys.exit(main())
