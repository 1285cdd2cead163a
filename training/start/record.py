"""What the owner of a run's folder keeps of a start: that it began, how it ended, and the page at its end."""

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel.failures import GOOD_ENDS
from parallel.launch import node_name
from program.errors import UserError
from program.processes import start_of
from program.schema import JSON
from program.untrusted import InputError, open_regular, parse_json
from training.run_dir.history import Event, note, read_history
from training.run_dir.report import write_report
from training.run_lock.lock import RunLock
from training.watchdog import verdict_file

TAIL_BYTES = 1 << 20
"""Hold the last line of metrics.jsonl."""


@dataclass(slots=True)
class RecordedStart:
    """The exit code with which it ends; 1 for what raises."""

    code: int = 1


@contextlib.contextmanager
def recorded_start(
    run_dir: Path, lock: RunLock, watch: Path, world_size: int, launcher: str, report: bool
) -> Iterator[RecordedStart]:
    """Around a start, in the process that owns ``run_dir``. watch: the start's folder of the watchdogs.

    report: write RUN_DIR/report.html at its end.
    """
    note_death(run_dir)
    note(
        run_dir, "start", attempt=lock.attempt, world_size=world_size, launcher=launcher, host=node_name(os.environ),
        watch=watch.name, age_s=round(_age_s(), 2), report=report,
    )  # fmt: skip
    record, text = RecordedStart(), ""
    try:
        yield record
    except UserError as error:
        record.code, text = 2, str(error)
        raise
    except SystemExit as stopped:
        record.code = stopped.code if isinstance(stopped.code, int) else 1
        raise
    finally:
        with contextlib.suppress(OSError):
            if lock.still_owns():
                verdict = verdict_file.read(watch) if record.code not in GOOD_ENDS else None
                text = verdict.line if verdict else text
                said: dict[str, Any] = {"text": text} if text else {}
                note(run_dir, "end", attempt=lock.attempt, exit_code=record.code, **said)
                if report and (problem := write_report(run_dir)):
                    print(f"warning: {run_dir / 'report.html'} is not written: {problem}", file=sys.stderr, flush=True)


def note_death(run_dir: Path) -> None:
    """Where the last start left no end: what is known of it, for good, since its folder of watchdogs will go."""
    start = last_without_end(read_history(run_dir))
    if start is None:
        return
    died_s, text = death(run_dir, start)
    last = last_line(run_dir / "metrics.jsonl")
    iteration = last.get("iteration")
    note(
        run_dir, "death", iteration if isinstance(iteration, int) else None,
        attempt=start.text("attempt"), died_s=died_s, text=text,
    )  # fmt: skip


def last_without_end(events: list[Event]) -> Event | None:
    """The newest start, unless it has ended."""
    places = [place for place, event in enumerate(events) if event.event == "start"]
    if not places:
        return None
    start, later = events[places[-1]], events[places[-1] + 1 :]
    attempt = start.fields.get("attempt")
    ended = any(one.event in ("end", "death") and one.fields.get("attempt") == attempt for one in later)
    return None if ended else start


def death(run_dir: Path, start: Event) -> tuple[float, str]:
    """When a start without an end died, and its verdict: by its watchdogs, or by its last line, without a verdict."""
    written = last_line(run_dir / "metrics.jsonl").get("time_s")
    last_s = max(start.time_s, float(written) if isinstance(written, int | float) else 0.0)
    if re.fullmatch(rf"{verdict_file.START}[\w-]+", start.text("watch")):
        watch = run_dir / verdict_file.WATCH / start.text("watch")
        with contextlib.suppress(OSError):
            if (verdict := verdict_file.read(watch)) is not None:
                return (watch / verdict_file.VERDICT).stat().st_mtime, verdict.line
    return last_s, ""


def last_line(path: Path) -> dict[str, JSON]:
    """The last whole line with a time of a file of JSON objects; empty where there is none."""
    with contextlib.suppress(OSError, InputError), open_regular(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        for line in reversed(file.readall().split(b"\n")[:-1]):
            with contextlib.suppress(InputError):
                found: dict[str, JSON] = parse_json(line, dict[str, JSON])
                if "time_s" in found:
                    return found
    return {}


def _age_s() -> float:
    """Of this process: what it took to import and to wait for the run's lock belongs to the start, too."""
    born = start_of(os.getpid())
    return 0.0 if born is None else time.clock_gettime(time.CLOCK_BOOTTIME) - born / os.sysconf("SC_CLK_TCK")
