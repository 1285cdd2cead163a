"""The processes of a run that was started as users start it: the one that was started, its ranks, their writers."""

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from program.processes import is_running, start_of

WRITER = "training.checkpoint.background"
"""In the command line of a process that saves in the background."""


class Process(NamedTuple):
    """A process, and no later one with its number."""

    pid: int
    start: int | None


@dataclass(kw_only=True, slots=True, frozen=True)
class Family:
    """All processes of a run on this machine."""

    launcher: Process
    ranks: tuple[Process, ...]
    """In the order of their ranks."""
    writers: tuple[Process, ...]
    """Those that save in the background, in the order of their ranks. A rank's watchdog is none of the family: it has
    to outlive its rank for a moment."""

    def all(self) -> list[Process]:
        """The launcher first."""
        return [self.launcher, *self.ranks, *self.writers]


def family(launcher: int) -> Family:
    """As it is now."""
    ranks = children(launcher)
    writers = [child for rank in ranks for child in children(rank.pid) if WRITER in command_of(child.pid)]
    return Family(launcher=Process(launcher, start_of(launcher)), ranks=tuple(ranks), writers=tuple(writers))


def command_of(pid: int) -> str:
    """Its command line; empty where it has gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def kill(processes: Iterable[Process]) -> None:
    """SIGKILL, whether they are still there or not."""
    for process in processes:
        if is_running(*process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


def all_gone(processes: Iterable[Process], within_s: float) -> bool:
    """Wait until all have ended; False where one is left."""
    left, deadline = list(processes), time.monotonic() + within_s
    while left := [process for process in left if is_running(*process)]:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def children(pid: int) -> list[Process]:
    """Of a process, in the order of their birth."""
    try:
        numbers = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    found = [Process(int(number), start_of(int(number))) for number in numbers]
    return sorted(found, key=lambda process: (process.start or 0, process.pid))
