"""The writer process of a rank: ``python -m training.checkpoint.background.process SOCKET MEMORY``."""

import contextlib
import mmap
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

from training.checkpoint import committing, room
from training.checkpoint.background.messages import (
    FAILED,
    Commit,
    MessageSocket,
    Outcome,
    Write,
    failure_of,
    mark_failed,
)
from training.checkpoint.format.manifest import DamagedError
from training.checkpoint.format.tables import IncompleteError
from training.checkpoint.format.writer import DATA, TABLE, FileWriter
from training.run_lock.lock import LockLost, RunLock

NOT_FOR_US = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
"""Terminals and SLURM send these to every process of a job; the rank hears them too, and it decides."""

POLL_S = 0.02
"""Seconds between two checks that all files are there; grows to 25 times as much."""


def main() -> int:
    """Serve the rank until it hangs up; what it asked for before that is finished."""
    for number in NOT_FOR_US:
        signal.signal(number, signal.SIG_IGN)
    lines = MessageSocket(socket.socket(fileno=int(sys.argv[1])))
    memory = int(sys.argv[2])
    while True:
        try:
            message = lines.receive()
        except (EOFError, OSError):
            return 0
        outcome = write(message, memory) if isinstance(message, Write) else None
        if isinstance(message, Commit):
            outcome = commit(message)
        if outcome is not None:
            with contextlib.suppress(OSError):  # the rank has gone; what it asked for is done all the same
                lines.send(outcome)


def write(message: Write, memory: int) -> Outcome:
    """Write the rank's file. A failure is left in the folder, too, for the committer."""
    began, error = time.monotonic(), None
    try:
        _write(message, memory)
    except (OSError, ValueError) as problem:
        error = str(problem)
        mark_failed(Path(message.folder), message.name, error)
    return Outcome(
        what="Write", folder=message.folder, seconds=time.monotonic() - began, bytes=message.total_bytes, error=error
    )


def _write(message: Write, memory: int) -> None:
    view = memoryview(b"")
    if message.total_bytes:
        view = memoryview(mmap.mmap(memory, message.total_bytes, prot=mmap.PROT_READ))
    position, folder = 0, Path(message.folder)
    with (
        room.explain_full_disk(folder / f"{message.name}{DATA}", message.total_bytes),
        FileWriter(folder, message.name) as file,
    ):
        for piece in message.pieces:
            group = message.groups[piece.group]
            size = group.piece_bytes(piece.shape)
            ends = [position + number * size for number in range(len(group.keys) + 1)]
            file.add(group, piece.offset, piece.shape, [view[ends[n] : ends[n + 1]] for n in range(len(group.keys))])
            position = ends[-1]


def commit(message: Commit) -> Outcome:
    """Wait for all writers' files and commit them. What fails is removed: it makes room for the next attempt."""
    began, folder = time.monotonic(), Path(message.filled.folder)
    path, size, error, lost = None, 0, None, False
    try:
        _wait_for_writers(message, folder)
        lock = RunLock(Path(message.run_dir), message.attempt) if message.run_dir and message.attempt else None
        path, size = committing.commit(message.filled, lock)
    except (OSError, IncompleteError, DamagedError, LockLost) as problem:
        error, lost = str(problem), isinstance(problem, LockLost)
        shutil.rmtree(folder, ignore_errors=True)
    seconds = time.monotonic() - began
    committed = None if path is None else str(path)
    return Outcome(
        what="Commit", folder=str(folder), seconds=seconds, bytes=size, error=error, path=committed, lost=lost
    )


def _wait_for_writers(message: Commit, folder: Path) -> None:
    """Raises OSError with what the first failed writer left, or when they take too long."""
    waiting, pause = list(message.filled.writers), POLL_S
    deadline = time.monotonic() + message.timeout_s
    while waiting:
        there = {entry.name for entry in folder.iterdir()}
        for name in waiting:
            if f"{name}{FAILED}" in there:
                raise OSError(f"{name}: {failure_of(folder, name)}")
        waiting = [name for name in waiting if f"{name}{TABLE}" not in there]
        if waiting and time.monotonic() > deadline:
            raise OSError(f"{waiting[0]}.bin: not finished within {message.timeout_s:.0f} s")
        if waiting:
            time.sleep(pause)
            pause = min(pause * 1.5, 25 * POLL_S)


if __name__ == "__main__":
    sys.exit(main())
