"""The host's memory, as far as a process may have it: the machine's, or what a container or job is allowed."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil

from program.untrusted import read_text

CGROUPS = Path("/sys/fs/cgroup")


def total_bytes() -> float:
    """Of the machine, or of the control group that a container or a job runs in (cgroup v2)."""
    return min([float(psutil.virtual_memory().total), *(limit for _, limit in _limits())])


def available_bytes() -> float:
    """What can be used without swapping: by the kernel's own count, and within the control group's limit."""
    return min([float(psutil.virtual_memory().available), *(limit - _held(group) for group, limit in _limits())])


def _limits() -> Iterator[tuple[Path, float]]:
    """The control groups that limit this process, and their limits in bytes."""
    with contextlib.suppress(OSError, IndexError):
        own = read_text(Path("/proc/self/cgroup")).splitlines()[-1].split("::")[1].lstrip("/")
        for group in dict.fromkeys((CGROUPS, CGROUPS / own)):
            with contextlib.suppress(OSError, ValueError):  # "max", or not there
                yield group, float(read_text(group / "memory.max"))


def _held(group: Path) -> float:
    """Bytes that the group cannot give up: without the files that it has read or written, and not used of late."""
    with contextlib.suppress(OSError, ValueError):
        lines = dict(line.split() for line in read_text(group / "memory.stat").splitlines())
        return float(read_text(group / "memory.current")) - float(lines.get("inactive_file", 0))
    return 0.0
