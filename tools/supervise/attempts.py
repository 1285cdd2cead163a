"""RUN_DIR/attempts.jsonl: what happened to a run, one JSON object per attempt to run it.

Written by what decides about the next attempt: the batch script, or one loop on each host.
"""

import errno
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from program.schema import JSON, Text
from program.untrusted import InputError, parse_json, read_bytes
from tools.supervise.rule import RunAttempt

ATTEMPTS = "attempts.jsonl"


@dataclass(kw_only=True, slots=True, frozen=True)
class AttemptRecord:
    """An attempt, who made it and where, and what was decided."""

    attempt: RunAttempt
    job: str
    """Whose budget it counts against: the batch job, requeued or not, or one start of a loop."""
    time: str = ""
    """When it ended, UTC."""
    nodes: str = ""
    """Where it ran, as SLURM writes it, or the host."""
    again: bool = False
    why: Text = ""
    exclude: tuple[str, ...] = ()
    """Nodes that the next attempt should do without, those of earlier attempts included."""
    markers: dict[str, int] = field(default_factory=dict)
    """Files in the run's folder that the decision went by, with their time in ns: seen once, they are old."""


def read(run_dir: Path) -> tuple[list[AttemptRecord], int]:
    """The records of all jobs, oldest first, and how many lines could not be read: a full disk leaves half ones.

    Raises OSError where there is a file that cannot be read.
    """
    try:
        lines = read_bytes(run_dir / ATTEMPTS).splitlines()
    except FileNotFoundError:
        return [], 0
    except InputError as error:
        raise OSError(errno.EINVAL, error.problem, str(run_dir / ATTEMPTS)) from None
    records = [_record(line) for line in lines if line.strip()]
    return [record for record in records if record is not None], records.count(None)


def of_job(records: Sequence[AttemptRecord], job: str) -> list[AttemptRecord]:
    """The records of one job."""
    return [record for record in records if record.job == job]


def append(run_dir: Path, record: AttemptRecord) -> None:
    """Add a line that is on the disk when this returns. Raises OSError where it cannot be kept."""
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / ATTEMPTS
    unfinished = path.exists() and path.stat().st_size > 0 and not read_bytes(path).endswith(b"\n")
    table = asdict(record)
    line = json.dumps(table.pop("attempt") | table)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, f"{'\n' if unfinished else ''}{line}\n".encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _record(line: bytes) -> AttemptRecord | None:
    """A line holds the fields of an Attempt and those of its Record side by side."""
    try:
        table = parse_json(line, dict[str, JSON])
        record: AttemptRecord = parse_json(json.dumps({**table, "attempt": table}), AttemptRecord)
    except InputError:
        return None
    return record
