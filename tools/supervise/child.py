"""The process of one attempt: signals go in, an exit code comes out, and nothing of it is left running.

Its descendants are found in /proc (Linux). Whatever outlives its parent becomes a child of the supervisor (the child
subreaper of prctl(2)), so that the ranks of a torchrun that was killed are found, too.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import psutil

from parallel.processes import die_with_parent
from parallel.untrusted import read_text

WRITERS_S = 30.0
"""For processes that were left over and save in the background: a checkpoint that is copied is worth the wait."""
RANKS_S = 20.0
"""For ranks that were left over, from SIGTERM to SIGKILL: they may still save."""


class Child:
    """A command that runs in a session of its own: Ctrl-C reaches it through the supervisor only, and so once."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Raises OSError where the command cannot be started."""
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
        self.process = subprocess.Popen(
            command, env=environ, start_new_session=True, preexec_fn=partial(die_with_parent, os.getpid())
        )

    def code(self) -> int | None:
        """Its exit code as a shell has it, 128 + N for signal N; None while it runs."""
        code = self.process.poll()
        return 128 - code if code is not None and code < 0 else code

    def send(self, number: int) -> None:
        """Hand a signal on. SIGUSR2 goes to the first of its processes that hear it: torchrun itself would die of it.

        Where none does yet, nothing has been trained that could be saved: SIGTERM ends it.
        """
        if number != signal.SIGUSR2:
            _send(self.process.pid, number)
            return
        hearing = list(_hearing(self.process.pid, number))
        for pid in hearing:
            _send(pid, number)
        if not hearing:
            _send(self.process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End all of it at once."""
        for pid in [self.process.pid, *_descendants(os.getpid())]:
            _send(pid, signal.SIGKILL)

    def end_leftovers(self) -> int:
        """After it ended: wait for what is still being saved, end the rest; how many processes there were to end."""
        began, ended = time.monotonic(), set[int]()
        while left := _children(os.getpid()):
            waited_s = time.monotonic() - began
            for pid in left:
                if waited_s > (RANKS_S if pid in ended else WRITERS_S):
                    _send(pid, signal.SIGKILL)
                    ended.add(pid)
                elif pid not in ended and _catches(pid, signal.SIGTERM):
                    _send(pid, signal.SIGTERM)
                    ended.add(pid)
            time.sleep(0.02)
        return len(ended)


def _children(pid: int) -> list[int]:
    """The children of this process that still run; those that have ended are collected."""
    found = []
    for child in _listed(pid):
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(child, os.WNOHANG)[0] == 0:
                found.append(child)
    return found


def _listed(pid: int) -> list[int]:
    try:
        return [int(number) for number in read_text(Path(f"/proc/{pid}/task/{pid}/children")).split()]
    except OSError:
        return []


def _descendants(pid: int) -> list[int]:
    with contextlib.suppress(psutil.Error):
        return [process.pid for process in psutil.Process(pid).children(recursive=True)]
    return []


def _hearing(pid: int, number: int) -> Iterator[int]:
    """The topmost processes from ``pid`` downwards that catch a signal; what they do with it is their business."""
    if _catches(pid, number):
        yield pid
        return
    for child in psutil.Process(pid).children() if psutil.pid_exists(pid) else []:
        yield from _hearing(child.pid, number)


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal: SigCgt of proc(5)."""
    with contextlib.suppress(OSError, ValueError):
        for line in read_text(Path(f"/proc/{pid}/status")).splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
