"""Asks every few seconds whether this machine is about to be taken away: a spot or preemption notice.

What asks is a command of the user's: docs/without_slurm.md has those for AWS, Google Cloud and Azure.
"""

import subprocess
import time
from collections.abc import Callable

TIMEOUT_S = 10.0
"""A command that takes longer has no answer."""


class Notice:
    """Runs a shell command every ``interval_s``; its exit code 0 is a notice. An empty command never says so."""

    def __init__(self, command: str, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.command, self.interval_s, self._clock = command, interval_s, clock
        self._asking: subprocess.Popen[bytes] | None = None
        self._asked_s = float("-inf")
        self.stands = False

    def poll(self) -> bool:
        """Whether a notice stands, by the last answer. Returns at once; call it often."""
        now_s = self._clock()
        if self._asking is not None:
            code = self._asking.poll()
            if code is not None:
                self.stands, self._asking = code == 0, None
            elif now_s - self._asked_s > TIMEOUT_S:
                self.close()
        elif self.command and now_s - self._asked_s >= self.interval_s:
            self._asked_s = now_s
            self._asking = subprocess.Popen(
                ["sh", "-c", self.command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        return self.stands

    def close(self) -> None:
        """End what is still being asked."""
        if self._asking is not None:
            self._asking.kill()
            self._asking.wait()
            self._asking = None
