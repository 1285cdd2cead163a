"""Processes of this machine: identified for good (a pid alone is reused), ended with their parent, safe from Ctrl-C."""

import contextlib
import ctypes
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

from program.untrusted import if_readable, read_text

_STATE, _START = 0, 19  # fields 3 and 22 of proc(5)'s stat, counted behind the parenthesised name


def machine() -> str:
    """Where a pid means something: this boot of this kernel, and the pid namespace that a container has to itself.

    Not the host's name: two machines may share one. Where there is no Linux /proc, the name has to do.
    """
    try:
        boot = read_text(Path("/proc/sys/kernel/random/boot_id")).strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return socket.gethostname()


def start_of(pid: int) -> int | None:
    """When ``pid`` started, in clock ticks after boot; None where /proc does not show it."""
    fields = _stat(pid)
    return int(fields[_START]) if fields else None


def is_running(pid: int, start: int | None) -> bool:
    """Whether the process that started at ``start`` (see ``start_of``) still runs or is stopped; a zombie is not.

    Unknown counts as running: other users' processes can be hidden (mount option hidepid).
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    fields = _stat(pid)
    if fields is None or start is None:
        return True
    return fields[_STATE] not in ("Z", "X") and int(fields[_START]) == start


def _stat(pid: int) -> list[str] | None:
    text = if_readable(read_text, Path(f"/proc/{pid}/stat"))
    return None if text is None else text.rpartition(")")[2].split()


def schedule_as_batch() -> None:
    """Ask Linux not to let wakeups interrupt this process, or threads and children that it starts from here on.

    CPU ranks wake each other, by gloo's threads, thousands of times a step. Where they outnumber the cores, the default
    policy lets each wakeup preempt a rank that computes; SCHED_BATCH (sched(7)) does not. 4 iterations of TP4 on 2
    virtual CPUs: 6.4 to 10.4 s before, 4.4 to 5.4 s with it (2026-11-23, three runs each). No privilege is needed.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # a container may forbid the call
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def die_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when its parent dies, so that none is ever left running."""
    with contextlib.suppress(OSError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, prctl(2)
    if os.getppid() != parent:
        os._exit(1)


@contextlib.contextmanager
def ctrl_c_later() -> Iterator[None]:
    """A Ctrl-C that comes within waits until the end. Processes started within never get it: they inherit the mask.

    A handler beside the mask, which is this thread's alone: any other thread of the process (tqdm's, a library's pool)
    may take the signal.
    """
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, before)
        if received:
            signal.raise_signal(signal.SIGINT)
