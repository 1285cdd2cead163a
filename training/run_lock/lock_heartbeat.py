"""A small process that counts in a file for as long as the owner of a run's folder lives.

A process of its own, for ranks are forked from the owner, and a fork of a process with threads can hang. It is not
the owner's child: it forks once more, so that waiting for or listing the owner's children finds ranks only.
It ends within milliseconds of its owner, however that ends: the owner holds the other end of its stdin.

Costs 10 MB of memory, 25 ms at the start, and one write of 20 bytes every ``BEAT_S`` seconds.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from program.processes import is_running
from program.untrusted import InputError, read_bytes

BEAT_S = 2.0
_ROOT = Path(__file__).resolve().parent.parent.parent
_NOT_FOR_US = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Terminals and SLURM send these to whole groups of processes; the owner may go on, and save, after them."""


def file_of(folder: Path, attempt: str) -> Path:
    """Where ``attempt`` counts."""
    return folder / f"owner.{attempt}.heartbeat"


def count(path: Path) -> bytes | None:
    """What ``path`` holds now; None where there is none. Opened again each time: that makes NFS revalidate."""
    try:
        return read_bytes(path)
    except FileNotFoundError:
        return None
    except InputError:  # another kind of file than what an owner writes: nothing counts in it
        return None


class LockHeartbeat:
    """The counting process of this process. Raises OSError where its file cannot be made or it cannot start."""

    def __init__(self, path: Path, process_start: int | None) -> None:
        _write(path, 0, os.O_CREAT)
        # Neither site-packages (-S) nor the environment's PYTHON... (-E): a third of the memory and of the start.
        command = [sys.executable, "-E", "-S", "-m", __name__, str(path.resolve()), str(os.getpid())]
        self._process = subprocess.Popen(
            [*command, "" if process_start is None else str(process_start)],
            cwd=_ROOT,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        if self._process.wait():
            raise OSError(None, f"the heartbeat process ended with {self._process.returncode}")

    def end(self) -> None:
        """End the process: by a byte, as ranks that were forked may still hold the pipe open."""
        pipe = self._process.stdin
        if pipe is not None and not pipe.closed:
            with contextlib.suppress(OSError):
                pipe.write(b".")
            pipe.close()


def main(path: str, pid: str, process_start: str) -> None:
    """The process: count until stdin says something or ends, the owner is gone, or the file is.

    The owner is looked at too, since a process forked from it may outlive it and hold stdin open.
    """
    for number in _NOT_FOR_US:
        signal.signal(number, signal.SIG_IGN)
    if os.fork():
        os._exit(0)
    counted, ended = 0, False
    while not ended and is_running(int(pid), int(process_start) if process_start else None):
        counted += 1
        try:
            _write(Path(path), counted)
        except FileNotFoundError:  # released, or taken over by a successor
            return
        except OSError:  # the disk is full or the server away: that passes, or newcomers take us for dead
            pass
        ended = bool(select.select([sys.stdin], [], [], BEAT_S)[0])


def _write(path: Path, number: int, flags: int = 0) -> None:
    """In place and closed each time: NFS hands over what was written at close, and the file stays the same one."""
    descriptor = os.open(path, os.O_WRONLY | flags, 0o644)
    try:
        os.pwrite(descriptor, f"{number:019d}\n".encode(), 0)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    main(*sys.argv[1:])
