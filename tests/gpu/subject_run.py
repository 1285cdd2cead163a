"""What a subject has to work with and what it has found, written after each thing: a crash loses what comes after."""

import json
import math
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallel.durable import replace_file
from tests.gpu.machine import GpuMachine
from tests.gpu.processes import ranks_of
from tests.gpu.sizes import Sizes

MARGIN_S = 5.0
"""What the subject keeps of its time, to say what its own processes had not the time for."""


class UnrunError(Exception):
    """The subject cannot be tried on this machine; the message says what is missing."""


@dataclass(kw_only=True)
class SubjectRun:
    """What a subject has to work with, and what it has found. It has passed when it ends without a problem."""

    machine: GpuMachine
    sizes: Sizes
    earlier: dict[str, Any] = field(default_factory=dict)
    """Subject -> its record, of those that ran before."""
    deadline: float = float("inf")
    """Of time.monotonic()."""
    path: Path | None = None
    lines: list[str] = field(default_factory=list)
    """For people."""
    numbers: dict[str, Any] = field(default_factory=dict)
    headline: str = ""
    """For the table at the end; empty: its last line."""
    problems: list[str] = field(default_factory=list)
    unrun: str = ""
    """Why it cannot be tried here."""
    late: list[str] = field(default_factory=list)
    """Parts that there was no time for."""

    @property
    def left_s(self) -> float:
        """Seconds for what the subject starts."""
        return self.deadline - time.monotonic() - MARGIN_S

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
        self, measurement: str, world_size: int = 1, environ: dict[str, str] | None = None, **arguments: object
    ) -> list[Any]:
        """``ranks_of`` within the subject's time. Raises RuntimeError where a rank fails."""
        return ranks_of(measurement, world_size, environ, max(1.0, self.left_s), **arguments)

    def part(self, name: str, work: Callable[[], None], least_s: float = 0.0) -> None:
        """One of several parts: what fails in it is a problem with its name, and the next goes on."""
        if self.left_s < least_s:
            self.late.append(name)
            self.say(f"{name}: not run: no time left")
            return
        try:
            work()
        except UnrunError as error:
            self.say(f"{name}: not run: {error}")
        except Exception as error:  # the other parts are still worth their time
            traceback.print_exc()
            self.problem(f"{name}: {type(error).__name__}: {error}")

    def save(self) -> None:
        """Into found.json, where there is a folder."""
        if self.path is not None:
            replace_file(self.path, json.dumps(speakable(self.found())).encode(), durable=False)

    def found(self) -> dict[str, Any]:
        """For the report."""
        return {name: getattr(self, name) for name in ("lines", "numbers", "headline", "problems", "unrun", "late")}


def speakable(value: Any) -> Any:
    """With "nan" and "inf" for what JSON has no numbers for."""
    if isinstance(value, dict):
        return {str(name): speakable(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [speakable(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
