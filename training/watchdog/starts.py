"""RUN_DIR/watch/start-...: one folder for each start of a run, the same for all its ranks.

What another start left there, or a second job that was refused the run's folder, is never taken for this start's.
"""

import contextlib
import hashlib
import shutil
from collections.abc import Mapping
from itertools import count
from pathlib import Path

from parallel.launch import Identity
from program.processes import machine
from training.watchdog import verdict_file

KEPT = 10
"""Starts whose stacks, dumps and verdict are kept: messages point to them."""
_STEP = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
_MEETING = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
"""All that torchrun tells every rank alike: a restart is counted by each agent for itself."""


def folder_of(run_dir: Path, identity: Identity | None, environ: Mapping[str, str], attempt: str | None) -> Path:
    """The folder of this start, absolute; not made yet.

    attempt: random, made by the launcher, where that is one of our processes. srun names each start. torchrun
    does not, where its port is fixed: its ranks meet in the first folder of their name that has no verdict yet.
    """
    watch = run_dir.absolute() / verdict_file.WATCH
    if attempt is not None or identity is None:
        return watch / f"{verdict_file.START}{attempt or 'alone'}"
    if identity.launcher == "srun":
        return watch / f"{verdict_file.START}{_digest([environ.get(name, '') for name in _STEP])}"
    meeting = [environ.get(name, "") for name in _MEETING]
    if meeting[1] == "localhost" or meeting[1].startswith("127.") or meeting[1] == "::1":
        meeting.append(machine())  # all ranks are on it, and those of another job may meet at their own localhost
    name = f"{verdict_file.START}{_digest(meeting)}"
    tries = (watch / (f"{name}-{number}" if number else name) for number in count())
    return next(folder for folder in tries if not (folder / verdict_file.VERDICT).exists())


def begin_start(folder: Path) -> None:
    """By the owner of the run's folder, as its ranks start: old starts are removed but for the newest ``KEPT``.

    Where an earlier start of the same name was ended as a whole, its nodes' words go; those that are of this one
    come again.
    """
    with contextlib.suppress(OSError):
        earlier = [path for path in folder.parent.glob(f"{verdict_file.START}*") if path != folder and path.is_dir()]
        earlier.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for path in earlier[KEPT - 1 :]:
            shutil.rmtree(path, ignore_errors=True)
    for left in (*folder.glob("node-*.json"), folder / verdict_file.JUDGE):
        with contextlib.suppress(OSError):
            left.unlink()
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)


def _digest(parts: list[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
