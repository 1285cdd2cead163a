"""Uploads into a bucket, killed at random moments and failed by the server: is anything lost, or half seen?"""

import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

from tests.faults import kills, program
from tests.faults.bucket_scene import (
    LIMIT_S,
    BucketScene,
    asked,
    contents,
    forked,
    scene,
    stored_name,
    uploader,
    uploaders,
)
from tests.faults.processes import Process, family, kill
from tests.faults.results import CaseResult, Store
from tests.support import buckets
from tests.support.small_checkpoints import committed
from training.checkpoint import folders
from training.checkpoint.bucket import uploading
from training.checkpoint.bucket.uploading import UploadOrder
from training.metrics.jsonl import read_jsonl

CAMPAIGN = "bucket"
TITLE = "Checkpoints in a bucket"
TEXT = """An S3 server (of half of the chains SeaweedFS, of the others moto's), and before it a proxy that fails
requests at random. Nine chains of ten upload checkpoints of three files, one in four of them by multipart: the program
that uploads gets SIGKILL at a random moment, or the server answers with errors, half bodies, lost answers, expired
credentials, listings as they were before; one time in ten the run goes back and saves the same iteration with other
bytes and the same sizes. Every tenth chain is a run of `pretrain_gpt.py` on 2 ranks, all of whose processes get
SIGKILL at a random moment; every second time its folder is lost, too, and it is continued from the bucket alone. After
every fault each checkpoint whose manifest is in the bucket is downloaded and must be whole, byte by byte, and the
newest that was there must be there still. Ten faults follow each other, then nothing fails: the newest checkpoint must
come into the bucket, nothing half may be left there, and a run's losses are, bit for bit, those of an undisturbed run.
"Seen" is what was there of the newest checkpoint."""
CHAIN, RUNS_EACH = 10, 10
AT_ONCE = 4
"""Chains, each with a server of its own: most of the time is spent in waiting."""
SERVERS = (buckets.seaweed, buckets.seaweed, buckets.moto, buckets.moto)
KILLED = ("SIGKILL", "SIGKILL", "SIGKILL, while the server answers 503", "SIGKILL, while answers are lost")
ANSWERED = {
    "500": 0.2, "503": 0.2, "truncated": 0.3, "reset": 0.2, "lost": 0.2, "expired": 0.1, "denied": 0.1, "stale": 0.7,
}  # fmt: skip
"""Of how many requests."""
LARGE = 12 << 20
"""Two parts and a half."""


def cases(count: int) -> list[str]:
    """``count`` faults in chains."""
    return [f"chain {number // CHAIN}, fault {number % CHAIN}" for number in range(count)]


def run(todo: Sequence[str], store: Store, scratch: Path, printed: Callable[[], None]) -> None:
    """Do the cases. A chain that was begun before starts over with its remaining faults."""
    by_chain: dict[int, list[str]] = {}
    for case in todo:
        by_chain.setdefault(int(case.split(",")[0].split()[1]), []).append(case)
    cache, undisturbed = scratch / "cache", list[float]()
    if any(_is_run(number) for number in by_chain):
        program.import_once(cache)
        undisturbed = kills.reference(scratch / "undisturbed", cache, (), 250)

    def work(place: Path, number: int, chains: Sequence[int]) -> int:
        place.mkdir()
        with scene(place, SERVERS[number]) as here:
            for number in chains:
                mine = by_chain[number]
                chain = RunChain if _is_run(number) else UploadChain
                one = chain(here, place / f"chain-{number}", Random(f"{store.seed} {mine[0]}"), cache, undisturbed)
                for case in mine:
                    store.add(_result(one, case, is_last=case == mine[-1]))
                    printed()
                shutil.rmtree(one.folder, ignore_errors=True)
        return 0

    parts = [(scratch / f"worker-{number}", number, sorted(by_chain)[number::AT_ONCE]) for number in range(AT_ONCE)]
    pids = [forked(partial(work, *part), scratch / f"{part[0].name}.log") for part in parts if part[2]]
    for pid in pids:
        if code := program.finish(pid):
            raise RuntimeError(
                f"{code}\n" + "\n".join(path.read_text()[-2000:] for path in scratch.glob("worker-*.log"))
            )


def _is_run(chain: int) -> bool:
    return chain % RUNS_EACH == RUNS_EACH - 1


def _result(chain: "UploadChain | RunChain", case: str, is_last: bool) -> CaseResult:
    began = time.monotonic()
    kind, outcome, problems = chain.fault()
    if is_last:
        problems += chain.end()
    seconds, problem = time.monotonic() - began, "; ".join(problems)
    return CaseResult(campaign=CAMPAIGN, case=case, kind=kind, outcome=outcome, seconds=seconds, problem=problem)


@dataclass
class UploadChain:
    """A folder of checkpoints, and the program that uploads them."""

    scene: BucketScene
    folder: Path
    draw: Random
    cache: Path
    undisturbed: Sequence[float]
    iteration: int = 0
    newest: Path | None = None
    before: set[str] = field(default_factory=set)
    """Complete in the bucket, when it was last looked at."""

    @property
    def root(self) -> Path:
        return folders.checkpoints(self.folder)

    @property
    def order(self) -> UploadOrder:
        url = self.scene.url(self.folder.name)
        return UploadOrder(root=str(self.root), url=url, attempt=self.folder.name, keep=3)

    def fault(self) -> tuple[str, str, list[str]]:
        """Save, upload, and something happens: what, what was seen, what is wrong."""
        if self.newest is None:
            asked(self.scene.scratch, lambda: uploading.claim(self.order.url, self.order.attempt))
        self._save()
        killed = self.draw.random() < 0.5
        kind = self.draw.choice(KILLED) if killed else self.draw.choice(list(ANSWERED))
        failure = kind if not killed else "503" if "503" in kind else "lost" if "lost" in kind else ""
        self.scene.fail({failure: ANSWERED[failure]} if failure else {})
        if killed:
            pid, stdin = uploader(self.order, self.folder / "log")
            time.sleep(self.draw.choice([self.draw.uniform(0, 1.0), self.draw.uniform(0.5, 2.5)]))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(stdin)
        else:
            self._upload()
        self.scene.fail()
        outcome, problems = self._look()
        return kind if killed else f"the server: {kind}", outcome, problems

    def _save(self) -> None:
        goes_back = self.newest is not None and self.iteration > 1 and self.draw.random() < 0.1
        parent = self.newest
        if goes_back:
            other = self.root / folders.name_of(self.iteration - 1)
            parent = other if folders.is_complete(other) else None
        else:
            self.iteration += 1
        size = LARGE if self.draw.random() < 0.25 else self.draw.randrange(1000, 100_000)
        self.newest = committed(
            self.root, self.iteration, parent.name if parent else None, seed=self.draw.randrange(1 << 30), keep=3,
            sizes=(size, 700, 600),
        )  # fmt: skip

    def _upload(self) -> int:
        """Until the newest is there, or that has failed: the exit code."""
        pid, stdin = uploader(self.order, self.folder / "log")
        deadline, log = time.monotonic() + LIMIT_S, self.folder / "log"
        size = log.stat().st_size if log.exists() else 0
        code: int | None = None
        while code is None and time.monotonic() < deadline:
            time.sleep(0.02)
            ended, status = os.waitpid(pid, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if ended else None
            if stdin >= 0 and log.exists() and b'"idle"' in log.read_bytes()[size:]:
                os.close(stdin)
                stdin = -1
        if stdin >= 0:
            os.close(stdin)
        if code is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        return -1 if code is None else code

    def _look(self) -> tuple[str, list[str]]:
        found = contents(self.order.url, self.scene.scratch)
        problems = list(found.damaged)
        kept = {stored_name(path) for path in folders.complete(self.root)}
        problems += [f"{name} was there, and is not" for name in self.before & kept - set(found.complete)]
        self.before = set(found.complete)
        assert self.newest is not None
        mine = stored_name(self.newest)
        if mine in found.complete:
            return "all of it", problems
        return "some files" if found.files.get(mine) else "nothing yet", problems

    def end(self) -> list[str]:
        """Once more, and nothing fails. A start that ends when the newest is there leaves the rest to the next one."""
        for _ in range(4):
            code = self._upload()
            outcome, problems = self._look()
            found = contents(self.order.url, self.scene.scratch)
            if code or not found.incomplete:
                break
        if code or outcome != "all of it" or found.newest != self.iteration:
            problems.append(f"at the end: {outcome} of iteration {self.iteration}, exit code {code}: {self._tail()}")
        if found.incomplete:
            problems.append(f"left behind: {found.incomplete}")
        return problems

    def _tail(self) -> str:
        return (self.folder / "log").read_text()[-400:]


@dataclass
class RunChain(UploadChain):
    """A run, whose processes are killed, and whose folder is lost."""

    def fault(self) -> tuple[str, str, list[str]]:
        """Start it, and kill it behind a commit of its own."""
        self.folder.mkdir(exist_ok=True)
        there = contents(self.order.url, self.scene.scratch).newest
        expected, log = max(there, kills.newest(self.root)), self.folder.with_suffix(".log")
        pid = self._start(log)
        deadline, wanted = time.monotonic() + LIMIT_S, expected + 1 + self.draw.randrange(4)
        while kills.newest(self.root) < wanted and time.monotonic() < deadline and kills._is_alive(pid):
            time.sleep(0.005)
        time.sleep(self.draw.uniform(0, 0.5))
        problems = [] if kills._is_alive(pid) else [f"the run has ended: {log.read_text()[-600:]}"]
        kill([*family(pid).all(), *uploaders(self.order.url), Process(pid, None)])
        program.finish(pid)
        problems += self._losses(expected)
        found = contents(self.order.url, self.scene.scratch)
        problems += found.damaged
        if found.newest < there:
            problems.append(f"iteration {there} was in the bucket, now the newest is {found.newest}")
        local = kills.newest(self.root)
        is_lost = self.draw.random() < 0.5
        if is_lost:
            shutil.rmtree(self.folder)
        how = "all processes of a run" + (", and its folder lost" if is_lost else "")
        return how, "all of it" if found.newest == local else "older ones", problems

    def _start(self, log: Path, *flags: str) -> int:
        saving = ("--checkpoint.save_interval", "1", "--checkpoint.bucket", self.order.url)
        background = str(self.draw.random() < 0.7)
        argv = program.command(self.folder, self.cache, 2, *saving, "--checkpoint.async_save", background, *flags)
        return program.start(argv, log)

    def _losses(self, expected: int) -> list[str]:
        path = self.folder / "metrics.jsonl"
        lines = [line for line in (read_jsonl(path) if path.exists() else []) if "loss" in line]
        other = [line["iteration"] for line in lines if line["loss"] != self.undisturbed[line["iteration"] - 1]]
        gap = [line["iteration"] for line in lines[-1:] if line["iteration"] <= expected]
        return [f"iterations {other} have other losses"] * bool(other) + [f"ended at {gap}, before {expected}"] * bool(
            gap
        )

    def end(self) -> list[str]:
        """Let it run to its end, from the bucket alone."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        before, log = contents(self.order.url, self.scene.scratch).newest, self.folder.with_suffix(".log")
        code = program.finish(self._start(log, "--train.exit_interval", "7"))
        found, expected = contents(self.order.url, self.scene.scratch), (before // 7 + 1) * 7
        problems = found.damaged + self._losses(before)
        if code or found.newest != expected:
            problems.append(
                f"the end: exit code {code}, {found.newest} in the bucket, not {expected}: {log.read_text()[-600:]}"
            )
        return problems
