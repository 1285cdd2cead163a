"""Every subject in a process of its own, within one budget of time: whatever one does, the next is run."""

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel.untrusted import read_json
from tests.gpu.processes import end_of

FULL_S = 1200.0
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "WANDB_MODE": "offline"}
"""No subject needs a network: one that would wait for it fails at once."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Subject:
    """What is proved, and how long it may take."""

    name: str
    function: str
    """``module:function``, which takes a SubjectRun."""
    least_s: float
    """With less it is not begun, and those before it leave it that much."""
    most_s: float
    """It is stopped after that: it hangs, or this machine is too slow for it."""
    shows: str
    """One line for the page."""


@dataclass(kw_only=True, slots=True)
class Budget:
    """Seconds of the whole script. Subjects' limits are for ``FULL_S``: with more they grow, with less they stay."""

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
        reserved = sum(each.least_s for each in following)
        most_s = subject.most_s * max(1.0, self.total_s / FULL_S)
        return min(most_s, max(subject.least_s, left - reserved))


def run_subject(subject: Subject, machine: dict[str, Any], size: str, earlier: dict[str, Any], limit_s: float) -> Any:
    """The subject's record: its verdict (passed, failed, unrun), what it found, and how long it took."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="triplane-prove-", ignore_cleanup_errors=True) as folder:
        task = {"machine": machine, "size": size, "earlier": earlier, "limit_s": limit_s}
        Path(folder, "task.json").write_text(json.dumps(task))
        command = [sys.executable, "-m", "tests.gpu.one_subject", subject.function, folder]
        ended = end_of(command, OFFLINE, limit_s)
        found = Path(folder, "found.json")
        record = read_json(found) if found.exists() else nothing()
    failure = ended.failure(limit_s)
    if failure and not (ended.code == 2 and record["problems"]):  # a user's mistake is its message
        record["problems"].append(failure)
    verdict = "failed" if record["problems"] else "unrun" if record["unrun"] else "passed"
    return {"verdict": verdict, **record, "exit_code": ended.code, "wall_s": time.monotonic() - began}


def nothing() -> dict[str, Any]:
    """Of a subject that found nothing."""
    return {"lines": [], "numbers": {}, "headline": "", "problems": [], "unrun": "", "late": []}


def not_run(why: str) -> dict[str, Any]:
    """The record of a subject that was not begun."""
    return {"verdict": "unrun", **nothing(), "unrun": why, "exit_code": None, "wall_s": 0.0}


def without_time(subject: Subject, left_s: float) -> str:
    """Why it was not begun."""
    return f"no time left ({max(0.0, left_s):.0f} s; it takes {subject.least_s:.0f} s or more)"
