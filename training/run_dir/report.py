"""RUN_DIR/report.html at a start's end, by ``python -m tools.report``: a process of its own, which can end no run.

Whoever owns the run's folder writes it; where the owner was killed, the watchdog of rank 0, which outlives it for a
moment. Standard library only: a watchdog runs without site-packages.
"""

import contextlib
import subprocess
import sys
from pathlib import Path

from program.processes import is_running, machine
from training.run_dir.history import read_history
from training.run_lock.record import current

LIMIT_S = 60.0
"""A page of 100,000 lines of metrics takes two seconds."""
_ROOT = Path(__file__).resolve().parents[2]


def write_report(run_dir: Path) -> str:
    """Write the page, where there are metrics to show; why it could not be written, or nothing."""
    if not (run_dir / "metrics.jsonl").is_file():
        return ""
    command = [sys.executable, "-m", "tools.report", str(run_dir.absolute())]
    try:
        done = subprocess.run(
            command, cwd=_ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: {error}"
    return (done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}") if done.returncode else ""


def report_for_the_dead(run_dir: Path) -> None:
    """Write the page in place of an owner that can no longer do it, if it wanted one."""
    with contextlib.suppress(OSError):
        owner = current(run_dir)
        if owner is None or owner.machine != machine() or is_running(owner.pid, owner.process_start):
            return
        own = [event for event in read_history(run_dir) if event.fields.get("attempt") == owner.attempt]
        if any(event.event == "start" and event.fields.get("report") is True for event in own):
            write_report(run_dir)
