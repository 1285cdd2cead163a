"""What a subject has to work with and what it has found, written after each thing: a crash loses what comes after."""

import json
import math
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from program.durable import replace_file
from tests.gpu.machine import GpuMachine
from tests.gpu.processes import ranks_of
from tests.gpu.sizes import Sizes

MARGIN_S = 5.0
"""What the subject keeps of its time, to say what its own processes had not the time for."""
LONGEST_S = 180.0
"""Of one measurement: after that it hangs. The slowest row, with compilation by Triton and Inductor, takes a minute."""


class UnrunError(Exception):
    """The subject cannot be tried on this machine; the message says what is missing."""


@dataclass(kw_only=True)
class SubjectRun:
    """What a subject has to work with, and what it has found. It has passed when it ends without a problem."""

    machine: GpuMachine
    sizes: Sizes
    earlier: dict[str, Any] = field(default_factory=dict)
    """Subject -> its record, of those that ran before."""
    before: dict[str, Any] = field(default_factory=dict)
    """This subject's own record in the report that is continued: rows that passed in it are kept."""
    only: tuple[str, ...] = ()
    """Patterns of rows to run (fnmatch); empty: all that have not passed."""
    deadline: float = float("inf")
    """Of time.monotonic()."""
    path: Path | None = None
    lines: list[str] = field(default_factory=list)
    """For people."""
    numbers: dict[str, Any] = field(default_factory=dict)
    headline: str = ""
    """For the table at the end; empty: its last line."""
    problems: list[str] = field(default_factory=list)
    rows: dict[str, Any] = field(default_factory=dict)
    """Row -> its verdict, lines, problems, seconds and commit."""
    unrun: str = ""
    """Why it cannot be tried here."""
    late: list[str] = field(default_factory=list)
    """Parts that there was no time for."""

    @property
    def left_s(self) -> float:
        """Seconds for what the subject starts; one process gets no more than ``LONGEST_S``."""
        return min(LONGEST_S, self.deadline - time.monotonic() - MARGIN_S)

    def say(self, *lines: str) -> None:
        """Lines of the table."""
        self.lines += lines
        self.save()

    def note(self, name: str, value: object) -> None:
        """A number, or a table of them, by name."""
        self.numbers[name] = value
        self.save()

    def problem(self, *texts: str) -> None:
        """What keeps the subject from passing."""
        self.problems += texts
        self.save()

    def measured(
        self, measurement: str, world_size: int = 1, environ: dict[str, str] | None = None, **arguments: Any
    ) -> list[Any]:
        """``ranks_of`` within the subject's time. Raises RuntimeError where a rank fails."""
        return ranks_of(measurement, world_size, environ, max(1.0, self.left_s), **arguments)

    def is_due(self, name: str) -> bool:
        """The row is asked for by name; where none is, it has not passed before."""
        if self.only:
            return any(fnmatch(name, pattern) for pattern in self.only)
        known = self.before.get("rows", {}).get(name)
        return not known or known["verdict"] != "passed"

    def part(self, name: str, work: Callable[[], None], least_s: float = 0.0) -> None:
        """A row: what fails in it is a problem with its name, and the next goes on. One that is not asked for, or has
        passed before, is not run."""
        if not self.is_due(name):
            return self._keep(name, self.before.get("rows", {}).get(name))
        if self.left_s < least_s:
            self.late.append(name)
            self.say(f"{name}: not run: no time left")
            return None
        return self._run(name, work)

    def _run(self, name: str, work: Callable[[], None]) -> None:
        lines, problems, began = len(self.lines), len(self.problems), time.monotonic()
        self.rows[name] = {"verdict": "failed", "lines": [], "problems": ["it did not come to its end"]}
        unrun = False
        try:
            work()
        except UnrunError as error:
            unrun = True
            self.say(f"{name}: not run: {error}")
        except Exception as error:  # the other rows are still worth their time
            traceback.print_exc()
            self.problem(f"{name}: {type(error).__name__}: {error}")
        failed = self.problems[problems:]
        self.rows[name] = {
            "verdict": "failed" if failed else "unrun" if unrun else "passed", "lines": self.lines[lines:],
            "problems": failed, "wall_s": time.monotonic() - began,
        }  # fmt: skip
        self.save()

    def _keep(self, name: str, known: dict[str, Any] | None) -> None:
        """A row of the report that is continued: its lines, problems and numbers."""
        if known is None:
            return
        self.rows[name] = known
        self.lines += known["lines"]
        self.problems += known["problems"]
        self.headline = self.headline or self.before["headline"]
        numbers = self.before["numbers"]
        for there, here in ((numbers, self.numbers), (numbers.get("rows", {}), self.numbers.get("rows", {}))):
            if name in there:
                here[name] = there[name]
        self.save()

    def save(self) -> None:
        """Into found.json, where there is a folder."""
        if self.path is not None:
            replace_file(self.path, json.dumps(speakable(self.found())).encode(), durable=False)

    def found(self) -> dict[str, Any]:
        """For the report."""
        names = ("lines", "numbers", "headline", "problems", "rows", "unrun", "late")
        return {name: getattr(self, name) for name in names}


def speakable(value: Any) -> Any:
    """With "nan" and "inf" for what JSON has no numbers for."""
    if isinstance(value, dict):
        return {str(name): speakable(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [speakable(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
