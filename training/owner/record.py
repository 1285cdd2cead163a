"""``owner.json``: which process, of which job, owns a run's folder since when."""

import dataclasses
import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from training.owner.processes import machine, start_of

OWNER = "owner.json"
_TAIL_BYTES = 1 << 16  # holds the last line of metrics.jsonl


@dataclass(kw_only=True, slots=True, frozen=True)
class Owner:
    """A run that owns, or wants to own, a folder. What identifies the folder tells a copy of it from itself."""

    attempt: str
    """Random, of this start of the run."""

    host: str
    machine: str
    """See ``processes.machine``."""

    pid: int
    process_start: int | None
    """Clock ticks after boot: with ``pid`` and ``machine``, one process and no other."""

    started: float
    """Seconds since 1970 by the owner's clock; for people, nothing is decided by it."""

    slurm_job: str = ""
    """CLUSTER/JOB_ID, or empty."""

    slurm_restart_count: int = 0
    folder_inode: int = 0
    folder_device: int = 0
    folder_path: str = ""
    """A hash: nothing in a run's folder holds its absolute path."""


def myself(folder: Path, environ: Mapping[str, str]) -> Owner:
    """This process as the owner of ``folder``, under a new attempt."""
    facts, job = folder.stat(), environ.get("SLURM_JOB_ID", "")
    return Owner(
        attempt=secrets.token_hex(8),
        host=socket.gethostname(),
        machine=machine(),
        pid=os.getpid(),
        process_start=start_of(os.getpid()),
        started=time.time(),
        slurm_job=f"{environ.get('SLURM_CLUSTER_NAME', '')}/{job}" if job else "",
        slurm_restart_count=int(environ.get("SLURM_RESTART_COUNT") or 0),
        folder_inode=facts.st_ino,
        folder_device=facts.st_dev,
        folder_path=hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16],
    )


def encode(owner: Owner) -> bytes:
    """The text of ``owner.json``."""
    return (json.dumps(dataclasses.asdict(owner), indent=1) + "\n").encode()


def read(path: Path) -> Owner | None:
    """The record in ``path``; None where there is none. Keys that another version wrote are passed over.

    A damaged one stands for an owner of whose process nobody knows, so that it is dead when nothing moves.
    """
    known = {field.name for field in dataclasses.fields(Owner)}
    try:
        entries = json.loads(path.read_bytes())
        return Owner(**{name: value for name, value in entries.items() if name in known})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, AttributeError):
        name = hashlib.sha256(path.name.encode()).hexdigest()[:16]  # a chain of damaged records has an end, too
        return Owner(attempt=name, host="an unknown host", machine="", pid=0, process_start=None, started=0.0)


def successor(folder: Path, attempt: str) -> Path:
    """The file that names who takes the folder over from ``attempt``."""
    return folder / f"owner.after-{attempt}"


def current(folder: Path) -> Owner | None:
    """Who owns ``folder``: whom ``owner.json`` names, or the last who took over from it; None: it is free."""
    owner = read(folder / OWNER)
    while owner is not None and (later := read(successor(folder, owner.attempt))) is not None:
        owner = later
    return owner


def describe(owner: Owner) -> str:
    """Host, pid, job and since when, for messages."""
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(owner.started))
    job = f", SLURM job {owner.slurm_job.rpartition('/')[2]}" if owner.slurm_job else ""
    return f"host {owner.host}, pid {owner.pid}{job}, since {since}"


def progress(folder: Path) -> str:
    """How far the run in ``folder`` is, from the last whole line of its ``metrics.jsonl``."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            last = file.read().split(b"\n")[-2]
        return f"at iteration {json.loads(last)['iteration']}"
    except (OSError, ValueError, LookupError, TypeError):
        return "before its first logged iteration"
