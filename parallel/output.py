"""Where a rank's words go: the console for people, log files for libraries."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from parallel.launch import Identity, node_name
from program.errors import UserError
from program.untrusted import regular_descriptor


@contextlib.contextmanager
def own_output(logs: Path, identity: Identity, every_rank: bool) -> Iterator[int | None]:
    """Send this process's stdout and stderr, C++ libraries' included, into ``logs``; the console stays clean.

    Yields the console's file descriptor on rank 0, None elsewhere. One file per node unless ``every_rank``: ranks
    append to it, so that a node holds one log handle per rank whatever the world's size. Raises UserError where that
    file cannot be opened.
    """
    logs.mkdir(parents=True, exist_ok=True)
    name = f"rank-{identity.rank:05d}.log" if every_rank else f"node-{node_name(os.environ)}.log"
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    try:
        file = regular_descriptor(logs / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    except OSError as error:
        raise UserError(f"{logs / name}: cannot be opened: {error.strerror}. Move it away, or make room.") from None
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    try:
        yield saved[0] if identity.rank == 0 else None
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(saved[0], 1)
        os.dup2(saved[1], 2)
        os.close(saved[0])
        os.close(saved[1])


def make_run_dir(run_dir: Path) -> None:
    """Create the run's folder. Raises UserError, before anything starts, where it cannot be written."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir):
            pass
    except OSError as error:
        raise UserError(
            f"run_dir {run_dir}: cannot be written: {error.strerror}. Choose another with --run_dir."
        ) from None
