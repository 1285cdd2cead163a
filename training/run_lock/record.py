"""``owner.json``: which process, of which job, owns a run's folder since when."""

import dataclasses
import hashlib
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from parallel.launch import whole_number
from program.errors import printable
from program.processes import machine, start_of
from program.schema import JSON, Count, Range, Text
from program.untrusted import InputError, open_regular, parse_json, read_json

Pid = Annotated[int, Range(0, 1 << 22)]
"""Linux's PID_MAX_LIMIT."""

OWNER = "owner.json"
_ATTEMPT = re.compile(r"[0-9a-f]{1,64}")
"""It is part of files' names."""
_TAIL_BYTES = 1 << 16  # holds the last line of metrics.jsonl


@dataclass(kw_only=True, slots=True, frozen=True)
class Owner:
    """A run that owns, or wants to own, a folder. What identifies the folder tells a copy of it from itself."""

    attempt: str
    """Random, of this start of the run."""

    host: Text
    machine: str
    """See ``processes.machine``."""

    pid: Pid
    process_start: Count | None
    """Clock ticks after boot: with ``pid`` and ``machine``, one process and no other."""

    started: float
    """Seconds since 1970 by the owner's clock; for people, nothing is decided by it."""

    slurm_job: str = ""
    """CLUSTER/JOB_ID, or empty."""

    slurm_restart_count: Count = 0
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
        slurm_job=printable(f"{environ.get('SLURM_CLUSTER_NAME', '')}/{job}") if job else "",
        slurm_restart_count=whole_number(environ, "SLURM_RESTART_COUNT", 0, 1 << 31, "0"),
        folder_inode=facts.st_ino,
        folder_device=facts.st_dev,
        folder_path=hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16],
    )


def encode(owner: Owner) -> bytes:
    """The text of ``owner.json``."""
    return (json.dumps(dataclasses.asdict(owner), indent=1) + "\n").encode()


def read(path: Path) -> Owner | None:
    """The record in ``path``; None where there is none. Keys that another version wrote are ignored.

    A damaged one stands for an owner of whose process nothing is known, so that it is dead when nothing moves.
    """
    try:
        owner: Owner = read_json(path, Owner)
    except FileNotFoundError:
        return None
    except InputError:
        return _unknown(path.name)
    return owner if _ATTEMPT.fullmatch(owner.attempt) else _unknown(path.name)


def _unknown(name: str) -> Owner:
    """What stands for a record that tells nothing; its attempt follows from ``name``, so that a chain has an end."""
    attempt = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:16]
    return Owner(attempt=attempt, host="an unknown host", machine="", pid=0, process_start=None, started=0.0)


def successor(folder: Path, attempt: str) -> Path:
    """The file that names who takes the folder over from ``attempt``."""
    return folder / f"owner.after-{attempt}"


def current(folder: Path) -> Owner | None:
    """Who owns ``folder``: whom ``owner.json`` names, or the last who took over from it; None: it is free.

    Records that name each other in a circle, which no run writes, stand for one unknown owner.
    """
    owner, seen = read(folder / OWNER), set[str]()
    while owner is not None:
        seen.add(owner.attempt)
        later = read(successor(folder, owner.attempt))
        if later is None:
            return owner
        owner = _unknown(" ".join(sorted(seen))) if later.attempt in seen else later
    return None


def describe(owner: Owner) -> str:
    """Host, pid, job and since when, for messages."""
    try:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(owner.started))
    except (OverflowError, OSError, ValueError):  # no time that a calendar has
        since = "an unknown time"
    job = f", SLURM job {owner.slurm_job.rpartition('/')[2]}" if owner.slurm_job else ""
    return f"host {owner.host}, pid {owner.pid}{job}, since {since}"


def progress(folder: Path) -> str:
    """How far the run in ``folder`` is, from the last whole line of its ``metrics.jsonl``."""
    try:
        with open_regular(folder / "metrics.jsonl") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            last = file.read().split(b"\n")[-2]
        return f"at iteration {parse_json(last, dict[str, JSON])['iteration']}"
    except (OSError, InputError, LookupError):
        return "before its first logged iteration"
