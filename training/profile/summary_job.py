"""The process that summarises a rank's trace while training goes on, and rank 0's word on all of them."""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from parallel.untrusted import InputError
from training.profile.files import SUMMARY, merge
from training.profile.page import page

ROOT = Path(__file__).resolve().parents[2]
END_TIMEOUT_S = 60.0
"""How long a run's end waits for the last summary."""


class SummaryJobs:
    """Of one rank: a process for each trace that it has written; on rank 0, what is said of each trace of all ranks."""

    def __init__(self, rank: int, ranks: Sequence[int], limit_mib: int, say: Callable[[str], None]) -> None:
        """ranks: those that are traced. say: prints on the console, from rank 0."""
        self.rank, self.ranks, self.limit_mib, self.say = rank, ranks, limit_mib, say
        self._processes: list[tuple[Path, subprocess.Popen[bytes]]] = []
        self._unsaid: list[Path] = []
        self._next_s = 0.0

    def start(self, trace: Path, device: str) -> None:
        """Of a trace that this rank has written. Raises OSError where no process can be started."""
        arguments = [str(trace.absolute()), device, str(self.limit_mib)]
        command = [sys.executable, "-m", "training.profile.summarize", *arguments]
        # In a session of its own: no Ctrl-C, and it ends by itself if this rank ends before.
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, start_new_session=True)
        self._processes.append((trace, process))

    def expect(self, folder: Path) -> None:
        """On rank 0: a summary will lie there, which is to be said."""
        if self.rank == 0:
            self._unsaid.append(folder)

    def poll(self) -> None:
        """Once a second at most, and only while something is under way: say what is complete."""
        if not (self._processes or self._unsaid) or time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + 1.0
        self._processes = [(trace, process) for trace, process in self._processes if self._runs(trace, process)]
        for folder in list(self._unsaid):
            self._say(folder, complete=True)

    def finish(self, beat: Callable[[], None]) -> None:
        """Wait for all, at a run's end; rank 0 says what there is then. beat: called all the while."""
        end_s = time.monotonic() + END_TIMEOUT_S
        while (self._processes or self._unsaid) and time.monotonic() < end_s:
            self._next_s = 0.0
            self.poll()
            if self._processes or self._unsaid:
                time.sleep(0.1)
                beat()
        for _, process in self._processes:
            process.kill()
            process.wait()
        for folder in list(self._unsaid):
            self._say(folder, complete=False)

    def _runs(self, trace: Path, process: "subprocess.Popen[bytes]") -> bool:
        code = process.poll()
        if code:
            text = f"warning: the summary of {trace} failed with exit code {code}, see logs/; the trace is there"
            (self.say if self.rank == 0 else partial(print, file=sys.stderr))(text)
        return code is None

    def _say(self, folder: Path, *, complete: bool) -> None:
        """What the folder's summary holds. complete: only if all ranks are in it."""
        try:
            summary = merge(folder, self.rank)  # again: two ranks may have done it at the same moment
        except (OSError, InputError) as error:
            if not complete:
                self.say(f"warning: no summary of a trace: {error}")
                self._unsaid.remove(folder)
            return
        if len(summary.ranks) >= len(self.ranks) or not complete:
            self.say(page(summary.ranks, folder / SUMMARY))
            self._unsaid.remove(folder)
