"""What the kernel says of a process of this node."""

import contextlib
import os
import select
from dataclasses import dataclass
from pathlib import Path

from program.untrusted import if_readable, read_text

_STATE, _CPU, _START, _EXIT_CODE = 0, slice(11, 13), 19, 49  # fields 3, 14 and 15, 22, 52 of proc(5)'s stat


@dataclass(kw_only=True, slots=True, frozen=True)
class Status:
    """A process in /proc. ``state``: R, S, D, T (stopped), t (in a debugger), Z (ended, not yet waited for)."""

    state: str
    cpu_ticks: int
    start: int
    ended_by: int | None
    """The signal that ended it, where it is a zombie that shows so."""


def status(pid: int, start: int | None) -> Status | None:
    """The process that started at ``start``; None where it has gone, or its number belongs to another by now."""
    fields = (if_readable(read_text, Path(f"/proc/{pid}/stat")) or "").rpartition(")")[2].split()
    if not fields:
        return None
    if start is not None and int(fields[_START]) != start:
        return None
    return Status(
        state=fields[_STATE], cpu_ticks=sum(map(int, fields[_CPU])), start=int(fields[_START]),
        ended_by=(int(fields[_EXIT_CODE]) & 127 or None) if fields[_STATE] in "ZX" else None,
    )  # fmt: skip


def lives(pid: int, start: int | None) -> bool:
    """Whether it runs, or is stopped."""
    found = status(pid, start)
    return found is not None and found.state not in "ZX"


def moved_bytes(pid: int) -> int:
    """Bytes that the process has read and written so far, from page cache or disk; 0 where the kernel does not tell."""
    with contextlib.suppress(OSError, ValueError):
        lines = (line.split() for line in read_text(Path(f"/proc/{pid}/io")).splitlines())
        return sum(int(value) for name, value in lines if name in ("rchar:", "wchar:", "read_bytes:"))
    return 0


def send(pid: int, start: int | None, number: int) -> None:
    """A signal to that process, if it is still there."""
    if lives(pid, start):
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def send_to_main_thread(pid: int, start: int | None, number: int) -> None:
    """A signal to that process, handled by its main thread, where the C library has tgkill(2) (glibc 2.30).

    Of a stopped process any thread may take a signal to the whole process when it continues. faulthandler then walks
    the main thread's frames while that one runs, and may crash it (seen once in five runs of the suite).
    """
    import ctypes  # only a watchdog that takes stacks pays for it

    if lives(pid, start):
        tgkill = getattr(ctypes.CDLL(None), "tgkill", None)
        if tgkill is None:
            send(pid, start, number)
        else:
            tgkill(pid, pid, number)


class Ending:
    """Waits for a process that need not be a child: by pidfd_open(2), or by looking where that is missing."""

    def __init__(self, pid: int, start: int | None) -> None:
        self._pid, self._start = pid, start
        self._descriptor: int | None = None
        with contextlib.suppress(OSError, AttributeError):
            self._descriptor = os.pidfd_open(pid)

    def within(self, timeout_s: float) -> bool:
        """Whether it has ended, at the latest after ``timeout_s``."""
        if self._descriptor is None:
            select.select([], [], [], timeout_s)
        else:
            select.select([self._descriptor], [], [], timeout_s)
        return not lives(self._pid, self._start)


def memory_kills() -> int:
    """How often the kernel's out-of-memory killer has struck in this process's control group; 0 where unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        group = read_text(Path("/proc/self/cgroup")).splitlines()[-1].rpartition(":")[2]
        return _kills(Path("/sys/fs/cgroup") / group.lstrip("/") / "memory.events")
    return 0


def host_memory_kills() -> int:
    """The same of all processes of the host, or of what a container takes for it; 0 where unknown."""
    return _kills(Path("/proc/vmstat"))


def _kills(file: Path) -> int:
    with contextlib.suppress(OSError, ValueError, StopIteration):
        return next(int(line.split()[1]) for line in read_text(file).splitlines() if line.startswith("oom_kill "))
    return 0
