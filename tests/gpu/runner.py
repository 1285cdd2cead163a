"""Subjects in processes of their own, within one budget of time: whatever one does, the others are run."""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from program.untrusted import read_json
from tests.gpu import one_subject, processes

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "WANDB_MODE": "offline"}
"""No subject needs a network: one that would wait for it fails at once."""
PRINTED = 20_000
"""Characters of a failed subject's output that are kept in the JSON."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Subject:
    """What is proved, and how long it may take."""

    name: str
    function: str
    """``module:function``, which takes a SubjectRun."""
    least_s: float
    """With less it is not begun, and those before it leave it that much."""
    shows: str
    """One line for the page."""
    timed: bool = True
    """It measures time or memory, and so has the machine to itself."""
    reads: tuple[str, ...] = ()
    """Subjects whose records it builds on."""


@dataclass(kw_only=True, slots=True)
class Budget:
    """Seconds of the whole script."""

    total_s: float
    began: float

    def left_s(self) -> float:
        """Of the whole."""
        return self.total_s - (time.monotonic() - self.began)

    def limit_s(self, subject: Subject, following: Sequence[Subject]) -> float | None:
        """What the subject may take: all but what those after it need at least. None: there is no time for it."""
        left = self.left_s()
        if left < subject.least_s:
            return None
        return max(subject.least_s, left - sum(each.least_s for each in following))


@dataclass(kw_only=True, slots=True)
class Running:
    """A subject that has been begun."""

    subject: Subject
    folder: Path
    child: processes.Child
    began: float
    limit_s: float

    def is_over(self) -> bool:
        """It has ended, or its time has."""
        return self.child.is_over() or time.monotonic() > self.began + self.limit_s

    def record(self, stopped: str = "") -> dict[str, Any]:
        """Its verdict (passed, failed, unrun), what it found until then, and how long it took. Ends it.

        stopped: why it is ended before its time.
        """
        ended = self.child.ended(stopped=not self.child.is_over())
        found = self.folder / "found.json"
        record = nothing() | (read_json(found) if found.exists() else {})
        failure = stopped or ended.failure(self.limit_s)
        if failure and not (ended.code == 2 and record["problems"]):  # a user's mistake is its message
            record["problems"].append(failure)
        verdict = "failed" if record["problems"] else "unrun" if record["unrun"] else "passed"
        printed = {"printed": ended.output[-PRINTED:]} if record["problems"] else {}
        own = {"exit_code": ended.code, "wall_s": time.monotonic() - self.began}
        return {"verdict": verdict, **record, **own, **printed}


def begin(subject: Subject, task: dict[str, Any], folder: Path, limit_s: float) -> Running:
    """The subject's process: a fork, where this one has imported everything. task: for ``one_subject``."""
    folder.mkdir()
    (folder / "task.json").write_text(json.dumps(task | {"limit_s": limit_s}))
    if processes.FORKS:
        child = processes.fork(partial(one_subject.main, subject.function, str(folder)), OFFLINE)
    else:
        child = processes.start(
            [sys.executable, "-m", "tests.gpu.one_subject", subject.function, str(folder)], OFFLINE
        )  # fmt: skip
    return Running(subject=subject, folder=folder, child=child, began=time.monotonic(), limit_s=limit_s)


Limit = Callable[[Subject], float | None]
Task = Callable[[Subject], dict[str, Any]]


def side_by_side(
    subjects: Sequence[Subject], task: Task, limit: Limit, at_once: int
) -> Iterator[tuple[Subject, dict[str, Any]]]:
    """Each with its record as it ends, ``at_once`` at a time. On Ctrl-C what has been found until then comes last."""
    waiting, keyboard = list(subjects), None
    running: list[Running] = []
    with tempfile.TemporaryDirectory(prefix="triplane-prove-", ignore_cleanup_errors=True) as scratch:
        while waiting or running:
            try:
                while waiting and len(running) < at_once:
                    subject = waiting.pop(0)
                    limit_s = limit(subject)
                    if limit_s is None:
                        yield subject, not_run(f"no time left (it takes {subject.least_s:.0f} s or more)")
                        continue
                    print(f"{subject.name} (at most {limit_s:.0f} s) ...", flush=True)
                    running.append(begin(subject, task(subject), Path(scratch, subject.name), limit_s))
                time.sleep(processes.POLL_S)
            except KeyboardInterrupt as error:
                keyboard, waiting = error, []
            for one in [one for one in running if keyboard or one.is_over()]:
                running.remove(one)
                yield one.subject, one.record("interrupted" if keyboard else "")
        if keyboard:
            raise keyboard


def nothing() -> dict[str, Any]:
    """Of a subject that found nothing."""
    return {"lines": [], "numbers": {}, "headline": "", "problems": [], "rows": {}, "unrun": "", "late": []}


def not_run(why: str) -> dict[str, Any]:
    """The record of a subject that was not begun."""
    return {"verdict": "unrun", **nothing(), "unrun": why, "exit_code": None, "wall_s": 0.0}
