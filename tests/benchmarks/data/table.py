"""Rows of the table, and how the work behind them is measured."""

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRow:
    """One measure."""

    name: str
    ours: float | None
    """In `unit`; None where it could not be measured."""
    unit: str
    theirs: float | None = None
    """The peer's, in the same unit."""
    at_least: float | None = None
    """What the ratio is to be."""
    at_most: float | None = None
    """What `ours` is to be at most, where there is no peer."""
    note: str = ""
    """Why something is missing."""
    is_rate: bool = False
    """Whether more is better."""

    @property
    def ratio(self) -> float | None:
        """How many times better ours is."""
        if not self.ours or not self.theirs:
            return None
        return self.ours / self.theirs if self.is_rate else self.theirs / self.ours

    @property
    def verdict(self) -> str:
        """yes, NO, or "not measured", which is no pass."""
        if self.ratio is not None and self.at_least is not None:
            return "yes" if self.ratio >= self.at_least else "NO"
        if self.ours is not None and self.at_most is not None:
            return "yes" if self.ours <= self.at_most else "NO"
        return "not measured"

    def text(self) -> str:
        """A line of the table."""
        numbers = [("-" if value is None else f"{value:,.4g}") for value in (self.ours, self.theirs)]
        ratio = "-" if self.ratio is None else f"{self.ratio:.1f}x"
        goal = f">= {self.at_least:g}x" if self.at_least is not None else f"<= {self.at_most:g}"
        cells = [f"{self.name:<58}", f"{numbers[0]:>10}", f"{numbers[1]:>10}", f"{self.unit:<14}", f"{ratio:>7}"]
        return " ".join([*cells, f"{goal:>9}", self.verdict, f"({self.note})" if self.note else ""]).rstrip()


def command_cpu_s(command: Sequence[str], cwd: Path, environ: dict[str, str]) -> float:
    """CPU-seconds of a command and all that it starts. Raises RuntimeError with the end of what it said."""
    before = os.times()
    ran = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True)
    after = os.times()
    if ran.returncode:
        raise RuntimeError(f"{command[0]} … ended with {ran.returncode}: {(ran.stderr or ran.stdout)[-300:].strip()}")
    return after.children_user + after.children_system - before.children_user - before.children_system


def cpu_s(work: Callable[[], object], rounds: int = 3) -> float:
    """CPU-seconds of some work in this process, the least of a few rounds."""
    found = []
    for _ in range(rounds):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return min(found)
