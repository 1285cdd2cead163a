"""What a signal asks of the supervisor, and what it passes on to the run.

TERM, Ctrl-C and HUP: save, end, and do not start again. USR2: save, end, and go on. What comes soon after the first
says nothing new; a second Ctrl-C, or another signal later, does not wait for the saving.
"""

import signal
import time
from collections.abc import Callable
from typing import Any

from tools.supervise.child import Child
from training.watchdog.stop_signal import REPEAT_S

ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Requests:
    """The signals that came; ``ended_by`` is the one after which nothing is started again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.ended_by: signal.Signals | None = None
        self._clock, self._came = clock, list[signal.Signals]()
        self._asked_s: float | None = None

    def listen(self) -> None:
        """Take the signals over; a HUP that nohup has turned off stays off."""
        for number in (*ENDS, signal.SIGUSR2):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self.hear)

    def hear(self, number: int, _frame: Any = None) -> None:
        """A signal has come; ``hand_on`` forwards it to the run."""
        found = signal.Signals(number)
        repeated = found == signal.SIGINT == self.ended_by
        if found in ENDS:
            self.ended_by = self.ended_by or found
        self._came.append(signal.SIGKILL if repeated else found)

    def hand_on(self, child: Child) -> None:
        """Tell the run what came meanwhile: the first request as it is, a later one by SIGKILL."""
        while self._came:
            number = self._came.pop(0)
            if self._asked_s is None:
                self.ask(child, signal.SIGTERM if number == signal.SIGHUP else number)
            elif number == signal.SIGKILL or self._clock() - self._asked_s > REPEAT_S:
                child.kill()

    def ask(self, child: Child, number: int) -> None:
        """Ask the run to save and end."""
        self._asked_s = self._clock()
        child.send(number)

    @property
    def asked(self) -> bool:
        """Whether the attempt that runs, or ran last, was asked to end."""
        return self._asked_s is not None

    def next_attempt(self) -> None:
        """What was asked of the last attempt is done; with nothing to stop, a request to go on is none."""
        self._asked_s = None
        self._came.clear()
