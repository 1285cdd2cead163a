"""Whether a run's folder takes what a run writes: proved by writing it in small, before anything is trained.

The steps are those of a save: folders, a temporary one, a file, fsync, a rename, and ``latest`` replaced. What lies
under the names that a run uses must be of the right kind: a FIFO named metrics.jsonl would block the first line, a
folder named ``done`` would fail the last.
"""

import contextlib
import errno
import os
import resource
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from program.errors import UserError
from program.surroundings import torch_fits
from program.untrusted import regular_descriptor
from training.checkpoint import folders, room
from training.checkpoint.room import reason

FOLDERS = ("checkpoints", "logs", "events", "watch", "wandb")
FILES = (
    "config.toml", "metrics.jsonl", "done", "requeue", "skipped_samples.json", "wandb_id", "owner.json",
    f"checkpoints/{folders.LATEST}", f"checkpoints/{folders.LATEST_OF_MEGATRON}",
)  # fmt: skip
KINDS = {stat.S_IFDIR: "a folder", stat.S_IFREG: "a file", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
LEAST_FILES = 256
"""Files and sockets that a rank has open: libraries, connections to other ranks, the parts of a checkpoint."""


def problem(run_dir: Path) -> str | None:
    """What stands in the way of a run in ``run_dir``, and what to do; None where nothing does. Leaves nothing behind.

    Makes the folder itself. Costs some ten operations on it.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        for text in wrong_kinds(run_dir):
            return text
        metrics = run_dir / "metrics.jsonl"
        if metrics.exists():
            os.close(regular_descriptor(metrics, os.O_WRONLY | os.O_APPEND))
        root = folders.checkpoints(run_dir)
        made = not root.exists()
        try:
            return room.save_problem(root) or _write_problem(run_dir / "logs")
        finally:
            if made:  # a start that ends before it trains, in here by a signal, leaves no folder of checkpoints
                with contextlib.suppress(OSError):
                    root.rmdir()
    except OSError as error:
        return f"run_dir {run_dir}: cannot be written: {reason(error)}. Choose another with --run_dir."


def wrong_kinds(run_dir: Path) -> Iterator[str]:
    """A sentence for each name in ``run_dir`` that stands for something that a run cannot write into."""
    for names, expected in ((FOLDERS, stat.S_IFDIR), (FILES, stat.S_IFREG)):
        for path in (run_dir / name for name in names):
            if not os.path.lexists(path):
                continue
            try:
                kind = stat.S_IFMT(path.stat().st_mode)
            except FileNotFoundError:
                found = f"a link to {path.readlink()}, which is not there"
                yield f"{path}: expected {KINDS[expected]}, found {found}. {_ADVICE}"
                continue
            if kind != expected:
                yield f"{path}: expected {KINDS[expected]}, found {KINDS.get(kind, 'a device')}. {_ADVICE}"


_ADVICE = "Move it away, or choose another folder with --run_dir."


def _write_problem(folder: Path) -> str | None:
    """None where a file is created that takes nothing, too: a run goes on without log lines, and says so
    (training/metrics/log_disk.py)."""
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f".probe-{secrets.token_hex(4)}"
    try:
        probe.write_bytes(b"x")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and probe.exists():
            return None
        return f"{folder}: cannot be written: {reason(error)}. Choose another folder with --run_dir."
    finally:
        probe.unlink(missing_ok=True)
    return None


def check_limits() -> None:
    """Take all the open files that the system allows. Raises UserError where these, or the memory that may be named,
    are too few."""
    if text := torch_fits():
        raise UserError(text)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < LEAST_FILES:
        raise UserError(
            f"this process may have {hard} files open; a rank needs {LEAST_FILES} or more, for libraries, connections "
            "and the files of a checkpoint. Raise the limit: ulimit -n 65536"
        )
