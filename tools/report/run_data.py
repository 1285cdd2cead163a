"""All that a run's folder tells, read once. Whatever is damaged or missing is left out; nothing in it is trusted."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from parallel.failures import GOOD_ENDS
from program.errors import UserError
from program.processes import is_running, machine
from program.schema import JSON
from program.untrusted import InputError, if_readable, parse_json, read_bytes, read_toml, toml_table
from tools.report.metrics_table import MetricsTable, read_metrics
from training.config.deprecated import in_current_names
from training.config.recipe import dump, flattened
from training.config.run_config import RunConfig
from training.metrics.redaction import redacted
from training.run_dir.goodput import MeasuredGoodput, measured_goodput
from training.run_dir.history import Event, read_history
from training.run_lock import lock_heartbeat
from training.run_lock.record import current
from training.start.record import death, last_line, last_without_end

SILENT_S = 120.0
"""An owner on another machine whose heartbeat's file is older does not run."""
EVALUATIONS, SAMPLES, TIMELINE = "evaluations.jsonl", "samples.jsonl", "profile/timeline.jsonl"
MOST_SAMPLES, MOST_EVALUATIONS, MOST_STEPS = 2000, 20_000, 500
"""Lines of these files: the newest ones."""

Status = Literal["running", "done", "stopped", "failed", "unknown"]


@dataclass(kw_only=True, slots=True)
class RunData:
    """A run as its folder has it."""

    folder: Path
    name: str
    metrics: MetricsTable
    events: list[Event]
    status: Status
    verdict: str
    """Why its last start failed; empty where it did not, or nothing says so."""
    goodput: MeasuredGoodput
    config: dict[str, JSON]
    """Every field of config.toml, ``section.name``, secrets redacted; empty where it cannot be read."""
    defaults: dict[str, JSON]
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    timeline: list[dict[str, Any]] = field(default_factory=list)
    profiles: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Name of the folder, and its summary.json; newest last."""
    unreadable: dict[str, int] = field(default_factory=dict)
    """File -> how many of its lines cannot be read, of those that have any."""
    read_s: float = 0.0
    """When, in Unix seconds."""

    @property
    def iteration(self) -> int:
        """The newest that is known."""
        newest = [column.iterations[-1] for column in self.metrics.columns.values() if column.iterations]
        return max([*newest, *(event.iteration or 0 for event in self.events[-1:])], default=0)

    @property
    def begins(self) -> list[Event]:
        """One per start that trained."""
        return [event for event in self.events if event.event == "begin"]

    def setting(self, name: str) -> Any:
        """A field of the configuration; its default where the file has none."""
        return self.config.get(name, self.defaults.get(name))


def read_run(folder: Path) -> RunData:
    """Raises UserError where the folder is none of a run."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder. Give a run's folder, with metrics.jsonl in it.")
    events = read_history(folder)
    if not events and not (folder / "metrics.jsonl").exists():
        raise UserError(f"{folder}: neither metrics.jsonl nor history.jsonl is there: no run has trained in it.")
    status, verdict = _status(folder, events)
    now_s = time.time()
    written = last_line(folder / "metrics.jsonl").get("time_s")
    last_s = float(written) if isinstance(written, int | float) else 0.0
    metrics = read_metrics(folder / "metrics.jsonl")
    unreadable = {"metrics.jsonl": metrics.unreadable} if metrics.unreadable else {}
    return RunData(
        folder=folder,
        name=folder.resolve().name,
        metrics=metrics,
        events=events,
        status=status,
        verdict=verdict,
        goodput=measured_goodput(events, now_s if status == "running" else None, last_s),
        config=_config(folder),
        defaults=dict(flattened(redacted(toml_table(dump(RunConfig()), "defaults")))),
        evaluations=_lines(folder, EVALUATIONS, MOST_EVALUATIONS, unreadable),
        samples=_lines(folder, SAMPLES, MOST_SAMPLES, unreadable),
        timeline=_lines(folder, TIMELINE, MOST_STEPS, unreadable),
        profiles=list(_profiles(folder)),
        unreadable=unreadable,
        read_s=now_s,
    )


def _status(folder: Path, events: list[Event]) -> tuple[Status, str]:
    """What the last start is doing, or how it ended, and why."""
    start = last_without_end(events)
    if start is not None:
        if _lives(folder):
            return "running", ""
        return "failed", death(folder, start)[1] or "it ended without a word, and no watchdog has left a verdict"
    ends = [event for event in events if event.event in ("end", "death")]
    if not ends:
        return ("done" if (folder / "done").exists() else "running" if _lives(folder) else "unknown"), ""
    end = ends[-1]
    if end.event == "end" and end.number("exit_code") in GOOD_ENDS:
        reasons = [event.text("reason") for event in events if event.event == "stop"]
        return "done" if reasons[-1:] == ["done"] else "stopped", ""
    return "failed", end.text("text") or f"exit code {end.number('exit_code'):g}"


def _lives(folder: Path) -> bool:
    """Whether the process that owns the folder runs."""
    with contextlib.suppress(OSError):
        owner = current(folder)
        if owner is None:
            return False
        if owner.machine == machine():
            return is_running(owner.pid, owner.process_start)
        return time.time() - lock_heartbeat.file_of(folder, owner.attempt).stat().st_mtime < SILENT_S
    return False


def _config(folder: Path) -> dict[str, JSON]:
    with contextlib.suppress(OSError, InputError):
        return dict(flattened(redacted(in_current_names(read_toml(folder / "config.toml", dict[str, JSON])))))
    return {}


def _lines(folder: Path, name: str, most: int, unreadable: dict[str, int]) -> list[dict[str, Any]]:
    """The newest lines that are objects with an iteration. Others count as ``unreadable``, but for a torn last one."""
    lines = (if_readable(read_bytes, folder / name, 256 << 20) or b"").splitlines(keepends=True)[-most:]
    read = [record for line in lines if (record := _record(line)) is not None]
    whole = sum(1 for line in lines if line.strip() and (line.endswith(b"\n") or _record(line) is not None))
    if whole > len(read):
        unreadable[name] = whole - len(read)
    return read


def _record(line: bytes) -> dict[str, Any] | None:
    with contextlib.suppress(InputError):
        record = parse_json(line, dict[str, JSON])
        if type(record.get("iteration")) is int and 0 <= record["iteration"] < 2**63:
            return dict(record)
    return None


def _profiles(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with contextlib.suppress(OSError):
        for path in sorted((folder / "profile").glob("iter_*/summary.json"))[-3:]:
            with contextlib.suppress(OSError, InputError):
                yield path.parent.name, parse_json(read_bytes(path), dict[str, JSON])


def changed_fields(run: RunData) -> list[tuple[str, JSON, JSON]]:
    """Name, value and default of the fields that differ from their default."""
    return [
        (name, value, run.defaults.get(name)) for name, value in run.config.items() if value != run.defaults.get(name)
    ]


def versions(run: RunData) -> dict[str, str]:
    """Of the last start that trained: name -> version."""
    found = run.begins[-1].fields.get("versions") if run.begins else None
    return {name: str(version) for name, version in found.items()} if isinstance(found, dict) else {}


def shown_name(runs: list[RunData]) -> list[RunData]:
    """Runs whose names differ: two folders of one name get their parents', too."""
    names = [run.name for run in runs]
    return [
        dataclasses.replace(run, name=f"{run.folder.resolve().parent.name}/{run.name}")
        if names.count(run.name) > 1
        else run
        for run in runs
    ]
