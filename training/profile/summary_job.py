"""The process that summarises a rank's trace while training goes on."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
END_TIMEOUT_S = 60.0
"""How long a run's end waits for the last summary."""


class SummaryJobs:
    """Of one rank: a process for each trace that it has written."""

    def __init__(self) -> None:
        self._processes: list[tuple[Path, subprocess.Popen[bytes]]] = []

    def start(self, trace: Path, device: str) -> None:
        """Of a trace that this rank has written. Raises OSError where no process can be started."""
        command = [sys.executable, "-m", "training.profile.summarize", str(trace.absolute()), device]
        # In a session of its own: no Ctrl-C, and it ends by itself if this rank ends before.
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, start_new_session=True)
        self._processes.append((trace, process))

    def poll(self) -> None:
        """Say which have failed; forget those that have ended."""
        for trace, process in self._processes:
            if code := process.poll():
                text = f"warning: the summary of {trace} failed with exit code {code}, see logs/; the trace is there"
                print(text, file=sys.stderr)
        self._processes = [(trace, process) for trace, process in self._processes if process.returncode is None]

    def finish(self, beat: Callable[[], None]) -> None:
        """Wait for all, at a run's end. beat: called all the while."""
        end_s = time.monotonic() + END_TIMEOUT_S
        self.poll()
        while self._processes and time.monotonic() < end_s:
            time.sleep(0.1)
            beat()
            self.poll()
        for _, process in self._processes:
            process.kill()
            process.wait()
