"""A rank's side of ``checkpoint.bucket``: the program that uploads, what is heard of it, and the wait at the end."""

import contextlib
import dataclasses
import json
import os
import random
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from parallel import metrics
from parallel.groups import Ranks
from program.untrusted import parse_json
from training.checkpoint import folders
from training.checkpoint.agreement import gathered, on_first_rank
from training.checkpoint.background.saver import companion
from training.checkpoint.bucket import uploading
from training.checkpoint.bucket.fetching import MEBIBYTE, asked
from training.checkpoint.bucket.process import UploadReport
from training.checkpoint.bucket.uploading import UploadOrder
from training.loop import Callback, Reason
from training.progress import Progress
from training.step import StepResult

AGAIN_S = 60.0
"""After a failure, until it is tried again; and up to as long again at random, so that nodes do not do so at once."""
SAY_S = 10.0
"""Between two lines of a wait."""


class Uploader:
    """The program of this node. Credentials are in its environment, as in the rank's, and not among its words."""

    def __init__(self, order: UploadOrder) -> None:
        words = ("training.checkpoint.bucket.process", json.dumps(dataclasses.asdict(order)))
        self.process = companion(*words, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdin is not None and self.process.stdout is not None
        self._to, self._from, self._rest = self.process.stdin, self.process.stdout, b""
        os.set_blocking(self._from.fileno(), False)

    def ask(self) -> None:
        """For "idle" as soon as the newest checkpoint is in the bucket."""
        with contextlib.suppress(OSError):  # it has just ended, which is heard of
            self._to.write(b"look\n")

    def reports(self) -> list[UploadReport]:
        """What it has said since the last call."""
        *lines, self._rest = (self._rest + (self._from.read() or b"")).split(b"\n")
        return [parse_json(line, UploadReport) for line in lines]

    def close(self) -> None:
        """Let it end: now, whatever it does. Nothing that is half uploaded is seen, and the next start goes on."""
        with self.process:
            self.process.kill()


class BucketCallback(Callback):
    """Has every committed checkpoint copied into the bucket while training goes on, which never ends for want of it."""

    def __init__(
        self, order: UploadOrder, ranks: Ranks, *, waits: bool, beat: Callable[[], None], note: Callable[..., None]
    ) -> None:
        """order: with the first node's number. waits: training stands still until each is there. note: keeps events:
        ``run_dir.history.Note``."""
        self.order, self.ranks, self.waits, self.beat, self.note = order, ranks, waits, beat, note
        self.uploader: Uploader | None = None
        self.again_s, self.there_s, self.left, self.sent = 0.0, time.monotonic(), 0, 0
        self.answered, self.newest = False, "none of this start yet"

    def start(self, progress: Progress) -> None:
        """Claim the prefix, which tries it, and start a program on each node. Raises SharedMistake or SharedFault."""
        asked(partial(uploading.claim, self.order.url, self.order.attempt), self.ranks)
        firsts = sorted(gathered([self.ranks.rank] if self.ranks.identity.local_rank == 0 else [], self.ranks))
        if self.ranks.rank in firsts:
            self.order = dataclasses.replace(self.order, node=firsts.index(self.ranks.rank), nodes=len(firsts))
            self.uploader = Uploader(self.order)

    def after_step(self, progress: Progress, result: StepResult) -> None:
        """Hear of it, and record how old the newest one in the bucket is."""
        self._hear()
        if self.ranks.rank == 0:
            metrics.record("bucket_age_s", time.monotonic() - self.there_s, reduce="max")

    def after_save(self, progress: Progress, path: Path, stall_s: float) -> None:
        """Wait, where training is to."""
        if self.waits:
            self._wait()

    def stop(self, progress: Progress, reason: Reason) -> None:
        """Wait for what is under way; a second signal ends that, and so does a failure."""
        self._wait()
        if self.uploader is not None:
            self.uploader.close()

    def _wait(self) -> None:
        """Until the newest checkpoint is in the bucket, or could not be brought there. Collective."""
        began = said = time.monotonic()
        self.answered, self.sent = False, 0
        if self.uploader is not None:
            if self.uploader.process.poll() is not None:
                self.uploader = self._anew(self.uploader)
            self.uploader.ask()
        while on_first_rank(lambda: not self.answered, self.ranks):
            time.sleep(0.1)
            self.beat()
            self._hear()
            if self.ranks.rank == 0 and time.monotonic() - said > SAY_S:
                said = time.monotonic()
                eta = f", {self.left * (said - began) / self.sent:,.0f} s" if self.sent else ""
                self.ranks.say(f"waiting for {self.order.url}: {self.left / MEBIBYTE:,.1f} MiB of this node left{eta}")

    def _hear(self) -> None:
        if self.uploader is None:
            return
        has_ended = self.uploader.process.poll() is not None  # before its last words are read
        for report in self.uploader.reports():
            self._take(report)
        if has_ended and not self.again_s:
            self.answered = True
            self.again_s = time.monotonic() + AGAIN_S * random.uniform(1, 2)
        elif has_ended and time.monotonic() > self.again_s:
            self.uploader = self._anew(self.uploader)

    def _take(self, report: UploadReport) -> None:
        if report.what == "sent":
            metrics.record("bucket_sent_gib", report.bytes / 2**30, reduce="sum")
            self.left, self.sent = report.left, self.sent + report.bytes
        elif report.what == "idle":
            self.answered = True
        elif self.ranks.rank:
            print(f"checkpoint.bucket: {report}", flush=True)  # into this rank's log
        elif report.what == "uploaded":
            self.there_s, self.newest = time.monotonic(), report.name
            self.ranks.say(
                f"checkpoint {report.name} UPLOADED ({report.bytes / MEBIBYTE:,.1f} MiB in {report.seconds:.1f} s)"
            )
            iteration = folders.iteration_of(Path(report.name))
            self.note("uploaded", iteration, bytes=report.bytes, seconds=round(report.seconds, 3))
        elif report.what == "failed":
            text = (
                f"checkpoint.bucket: {report.text.rstrip('.')}. The newest there is {self.newest}; it is tried again "
                "in some minutes, or by the next start"
            )
            self.ranks.say(text)
            self.note("upload_failed", text=text)

    def _anew(self, ended: Uploader) -> Uploader:
        ended.close()
        self.again_s = 0.0
        return Uploader(self.order)
