"""One run through ``[[stage]]`` tables whose shards and checkpoints are in a bucket: what happens to it, and whether it
ends as an undisturbed run does."""

import os
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import NamedTuple

from tests.faults import program, stages
from tests.faults.bucket_scene import BucketScene, asked, contents, uploaders
from tests.faults.processes import Process, all_gone, children, family, kill
from tests.faults.stage_plans import AXES, StagePlan
from tests.support.buckets import KEY, SECRET
from tools.inspect_checkpoint import compare
from tools.inspect_checkpoint.contents import parameters
from training.checkpoint import folders
from training.checkpoint.bucket import stored
from training.checkpoint.format.reader import FileReader
from training.metrics.jsonl import read_jsonl
from training.run_dir.history import read_history

LIMIT_S = 240.0
"""Whatever takes longer hangs."""
STOPPED = (75, 0, -signal.SIGTERM)
"""Exit codes of a run that got SIGTERM: at a step, at its end, and before it could listen."""
PASSING = {"500": 0.03, "503": 0.03, "truncated": 0.06, "short": 0.04, "reset": 0.03, "lost": 0.03}
"""Of how many requests, throughout: what a run must live with."""
REFUSING = {"expired": 0.05, "denied": 0.05}
"""What may end it, with exit codes of a mistake or a fault."""
STALE = {"stale": 0.3}
HUNG = 255
"""In place of an exit code."""
VICTIMS = ("a rank", "a rank", "the launcher", "all processes", "the uploader", "SIGTERM")


class Moment(NamedTuple):
    """When something happens: so many lines of metrics.jsonl, or of the proxy's requests, from now on."""

    words: str
    pattern: bytes
    most: int


STEP = Moment("in training", rb'"loss"', 6)
BLOCKS = Moment("while blocks come", rb"GET /triplane/corpus/\w\.bin", 60)
UPLOAD = Moment("while a checkpoint goes up", rb"PUT /triplane/run/checkpoints", 6)
MOST_STEPS = 9
"""Of a start: what something else waits for may not come, as blocks of a small corpus."""


class Happened(NamedTuple):
    """What is counted: two columns of docs/faults.md."""

    what: str
    how: str


@dataclass(kw_only=True)
class BucketRun:
    """The run, and what was done to it."""

    scene: BucketScene
    plan: StagePlan
    folder: Path
    draw: Random
    layouts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By name, ranks and sizes of the axes TP, PP, CP and EP. Empty: the stages have their own, of two ranks."""
    flags: tuple[str, ...] = ()
    counts: Counter[Happened] = field(default_factory=Counter)
    cluster: int = 0
    newest: int = 0
    """Iteration of the newest checkpoint that was said to be in the bucket, or seen there."""

    @property
    def url(self) -> str:
        return self.scene.url("run")

    @property
    def run_dir(self) -> Path:
        return self.folder / f"cluster-{self.cluster}"

    @property
    def cache(self) -> Path:
        """Of blocks, too."""
        return self.folder / "cache"

    @property
    def is_done(self) -> bool:
        return (self.run_dir / "done").exists()

    def disturbed(self) -> list[str]:
        """A start, and what ends it; what is wrong then."""
        moment, is_elsewhere = self.draw.choice((STEP, STEP, BLOCKS, UPLOAD)), self.newest and self.draw.random() < 0.25
        if is_elsewhere:
            self._move()
        if moment is BLOCKS:
            shutil.rmtree(self.cache, ignore_errors=True)
        also = self._more_failures()
        self.scene.fail(PASSING | also)
        others = children(os.getpid())
        pid = self._start()
        victim = self._harmed(pid, moment)
        code = self._ended(pid)
        left = [one for one in children(os.getpid()) if one not in others]
        problems = [] if all_gone(left, LIMIT_S) else [f"left behind by {victim}: {left}"]
        if victim == "SIGTERM" and code not in STOPPED and also is not REFUSING:
            problems.append(f"SIGTERM: expected one of the exit codes {STOPPED}, found {code}: {self._tail()}")
        if code == HUNG or (not victim and code and also is not REFUSING):
            problems.append(f"the run hung, or ended by itself, exit code {code}: {self._tail()}")
        return problems + self._lost()

    def _more_failures(self) -> dict[str, float]:
        """Beside those that pass. A listing that lags may show a bucket that nothing has come into yet: then only the
        run's folder can tell."""
        if self.draw.random() < 0.6:
            return {}
        has_own = bool(folders.complete(self.run_dir / "checkpoints"))
        return STALE if self.draw.random() < 0.7 and has_own else REFUSING

    def to_its_end(self) -> list[str]:
        """With the passing faults alone: what is wrong."""
        if self.is_done:
            return []
        self.scene.fail(PASSING)
        pid = self._start()
        code = self._ended(pid)
        return [] if self.is_done and not code else [f"the end: exit code {code}: {self._tail()}"]

    def _start(self) -> int:
        name = self.draw.choice([*self.layouts]) if self.layouts else "layouts of the stages' own"
        self.counts[Happened("starts", f"in {name}")] += 1
        ranks, *sizes = self.layouts.get(name, (2,))
        axes = [f"--parallel.{axis}_parallel_size" for axis in (*AXES, "expert_model")][: len(sizes)]
        words = [word for axis, size in zip(axes, sizes, strict=True) for word in (axis, str(size))]
        there = ("--checkpoint.bucket", self.url, "--data.bucket_cache_gb", "0.04")
        return stages.start(self.plan, self.run_dir, ranks, *there, *self.flags, *words)

    def _harmed(self, pid: int, moment: Moment) -> str:
        """Wait for the moment, and kill: what; "" where the run has ended before, or nothing comes."""
        while True:
            met = self._await(moment, pid)
            if met is None or not stages.is_alive(pid):
                return ""
            victim, processes = self._victim(pid)
            self.counts[Happened(victim, met.words)] += 1
            if victim == "SIGTERM":
                os.kill(pid, signal.SIGTERM)
                return victim
            kill(processes)
            if victim != "SIGKILL of the uploader":
                return victim
            moment = STEP  # the run goes on without it

    def _victim(self, pid: int) -> tuple[str, list[Process]]:
        """Of those that are there now."""
        found, name = family(pid), self.draw.choice(VICTIMS)
        if name == "the uploader" and (ours := uploaders(self.url)):
            return f"SIGKILL of {name}", ours
        if name == "a rank" and found.ranks:
            return f"SIGKILL of {name}", [self.draw.choice(found.ranks)]
        if name == "the launcher":
            return f"SIGKILL of {name}", [found.launcher]
        return (name, []) if name == "SIGTERM" else ("SIGKILL of all processes", found.all())

    def _await(self, moment: Moment, pid: int) -> Moment | None:
        """Until it has come, or MOST_STEPS: which it was; None where nothing comes."""
        metrics, deadline = self.run_dir / "metrics.jsonl", time.monotonic() + LIMIT_S
        file = metrics if moment is STEP else self.scene.log
        wanted = counted(file, moment) + self.draw.randrange(1, moment.most + 1)
        most = counted(metrics, STEP) + MOST_STEPS
        while stages.is_alive(pid) and counted(file, moment) < wanted:
            if time.monotonic() > deadline:
                return None
            if counted(metrics, STEP) >= most:
                return STEP
            time.sleep(0.02)
        time.sleep(self.draw.uniform(0, 0.2))
        return moment

    def _ended(self, pid: int) -> int:
        """Its exit code, once it has ended; it is killed where it does not."""
        deadline = time.monotonic() + LIMIT_S
        while stages.is_alive(pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        if stages.is_alive(pid):
            kill(family(pid).all())
            program.finish(pid)
            return HUNG
        return program.finish(pid)

    def _move(self) -> None:
        """To another cluster: of this one nothing stays but what the test compares in the end."""
        left = self.run_dir
        self.cluster += 1
        self.run_dir.mkdir()
        for path in [*left.glob("metrics.jsonl"), *left.glob("samples-*.jsonl"), *left.glob("console.log")]:
            path.rename(self.run_dir / path.name)
        shutil.rmtree(left)
        shutil.rmtree(self.cache, ignore_errors=True)
        self.counts[Happened("starts", "from the bucket alone")] += 1

    def _lost(self) -> list[str]:
        """What the bucket has no more, or not whole."""
        said = [one.iteration or 0 for one in read_history(self.run_dir) if one.event == "uploaded"]
        self.newest = max(self.newest, *said, 0)
        self.scene.fail()
        found = contents(self.url, self.scene.scratch)
        problems = list(found.damaged)
        if found.newest < self.newest:
            problems.append(f"iteration {self.newest} was in the bucket, now the newest is {found.newest}")
        self.newest = max(self.newest, found.newest)
        return problems

    def differences(self, undisturbed: Path) -> list[str]:
        """Of samples, counters and losses, and of the weights in the bucket. Counts changes of stages, too."""
        numbers = [line["stage"] for line in read_jsonl(self.run_dir / "metrics.jsonl") if "loss" in line]
        changes = sum(now > before for before, now in pairwise(numbers))  # those that were done again included
        self.counts[Happened("stage changes", "gone through")] = changes
        problems = stages.differences(undisturbed, self.run_dir) + self._lost()
        expected = folders.complete(undisturbed / "checkpoints")[-1]
        target = self.folder / "fetched"
        target.mkdir()
        self.scene.fail()

        def fetch() -> int:
            newest = stored.newer(None, self.url)[0]
            stored.fetched(newest, target, newest.files)
            return newest.iteration

        if (iteration := asked(self.scene.scratch, fetch)) != folders.iteration_of(expected):
            return [*problems, f"the newest in the bucket is that of iteration {iteration}, not {expected.name}"]
        return problems + other_weights(expected, target)

    def traces(self) -> list[str]:
        """Of credentials in what the run has left."""
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        found = [path for path in files if any(word.encode() in path.read_bytes() for word in (KEY, SECRET))]
        return [f"credentials in {path}" for path in found]

    def count_failures(self) -> list[str]:
        """What the server has failed, by what was asked for; a problem where nothing was."""
        for failure, method, path in (line.split(" ", 2) for line in self.scene.log.read_text().splitlines()):
            if failure != "-":
                does = "reading" if method in ("GET", "HEAD") else "writing"
                of = "listings" if "list-type=" in path else "shards" if "/corpus/" in path else "checkpoints"
                self.counts[Happened(f"the server: {failure}", f"{does} {of}")] += 1
        missed = {"reading shards", "reading checkpoints", "writing checkpoints"} - {one.how for one in self.counts}
        return [f"no request failed, {one}" for one in missed]

    def _tail(self) -> str:
        return (self.run_dir / "console.log").read_text()[-1500:]


def counted(file: Path, moment: Moment) -> int:
    """How often its line has come."""
    return len(re.findall(moment.pattern, file.read_bytes())) if file.exists() else 0


def other_weights(expected: Path, found: Path) -> list[str]:
    """Weights of two checkpoints that differ by more than rounding, relative to their norm."""
    with FileReader(expected) as one, FileReader(found) as other:
        pairs = [
            pair for pair in compare.pairs(parameters(one.tensors), parameters(other.tensors)) if pair[1] == "weights"
        ]
        tensors = compare.compare(pairs, one, other, lambda _: None)
    apart = {one.name: one.relative for one in tensors if not one.is_same}
    wrong = {name: far for name, far in apart.items() if far is None or far > stages.BOUND}
    return [f"weights differ: {wrong}"] if wrong or not tensors else []
