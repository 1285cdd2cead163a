"""The program beside a node's first rank: ``python -m training.checkpoint.bucket.process ORDER``.

It hears lines on stdin: "look" asks for ``idle`` as soon as the newest checkpoint is in the bucket; their end ends it.
It prints an ``UploadReport`` a line. What fails ends it, too: the rank starts it again, with connections and
credentials that are read again.
"""

import contextlib
import dataclasses
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
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

    what: Literal["sent", "uploaded", "removed", "failed", "idle"]
    name: Text = ""
    """Of the checkpoint."""
    bytes: int = 0
    """sent: since the last such report. uploaded: of all files."""
    left: int = 0
    """sent: bytes that this node has still to send."""
    seconds: float = 0.0
    text: Text = ""


def say(report: UploadReport) -> None:
    """To the rank."""
    print(json.dumps(dataclasses.asdict(report)), flush=True)


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
        say(UploadReport(what="failed", text=text))
        return 1


def first_node(order: UploadOrder) -> int:
    """Decide what is uploaded, commit it, and keep retention's rule."""
    root, seen, asked = Path(order.root), None, False
    while True:
        now = list(_visible(root))
        if now != seen or asked:
            view = uploading.look(order)
            if not view.lacking:
                for one in view.removable:
                    uploading.remove(order, one)
                    say(UploadReport(what="removed", name=one.name))
                seen = now
            if asked and view.newest not in view.lacking:
                say(UploadReport(what="idle"))
                asked = False
            if view.lacking:
                path = view.lacking[0].path
                uploading.pin(root, path)
                _upload(order, path)
                uploading.pin(root, None)
        if (heard := _heard(0.0 if now != seen else POLL_S)) is None:
            return 0
        asked = asked or heard


def _visible(root: Path) -> Iterator[tuple[str, int]]:
    """What tells whether something was committed or deleted since."""
    for path in folders.complete(root):
        with contextlib.suppress(FileNotFoundError):
            yield path.name, (path / MANIFEST).stat().st_mtime_ns


def other_node(order: UploadOrder) -> int:
    """Send this node's share of what the first one has chosen."""
    root, done = Path(order.root), None
    while True:
        path = folders.uploading(root)
        now = next((one for one in _visible(root) if path and one[0] == path.name), None)
        if path is not None and now is not None and now != done:
            _upload(order, path)
            done = now
        if _heard(POLL_S) is None:
            return 0


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
    say(UploadReport(what="uploaded", name=path.name, bytes=size, seconds=time.monotonic() - began))


class _Sent:
    """Counts bytes, which several threads send, and tells the rank now and then."""

    def __init__(self, name: str, left: int) -> None:
        self.name, self.left, self.sent, self.said_s = name, left, 0, time.monotonic()
        self.lock = threading.Lock()
        self.tell()

    def __call__(self, count: int) -> None:
        with self.lock:
            self.left, self.sent = self.left - count, self.sent + count
            if time.monotonic() - self.said_s > REPORT_S:
                self.tell()

    def tell(self) -> None:
        say(UploadReport(what="sent", name=self.name, bytes=self.sent, left=self.left))
        self.sent, self.said_s = 0, time.monotonic()


def _heard(timeout_s: float) -> bool | None:
    """Whether the rank asks; None where it has hung up."""
    if not select.select([0], [], [], timeout_s)[0]:
        return False
    return bool(os.read(0, 1 << 10)) or None


if __name__ == "__main__":
    sys.exit(main())
