"""Requests to stop: the first SIGUSR2, SIGTERM, SIGHUP or Ctrl-C asks for a checkpoint and a clean end.

SLURM sends SIGUSR2 where ``--signal=B:USR2@...`` and the batch script say so, and SIGTERM for scancel, preemption and
the time limit; some of them twice within a moment, so what comes soon after the first says nothing new. SIGHUP comes
when a terminal or an ssh connection closes.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from parallel.failures import STOPPED
from program.errors import StoppedOnRequest
from program.users_code import end_now

REPEAT_S = 5.0
"""A request that comes so long after the first is meant: end at once."""
NUMBERS = (signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class StopSignal:
    """Whether this process was asked to stop. Before training there is nothing to save: it ends right there."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, speaks: bool = False) -> None:
        """speaks: this process says that it stops before training began; one of all ranks does."""
        self.number: int | None = None
        self.speaks = speaks
        self.training = False
        self.tell: Callable[[], None] = lambda: None
        """Called at the first request, from a signal handler."""
        self._clock, self._first_s = clock, 0.0

    def listen(self) -> None:
        """Take the signals over, but for those that this process inherited as ignored: SIGHUP under nohup, say.

        SIGUSR2 always: torchrun's agents ignore it, or they would die of it, and ranks inherit that.
        """
        for number in NUMBERS:
            if number == signal.SIGUSR2 or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self.hear)

    def hear(self, number: int, _frame: Any = None) -> None:
        """A signal has come. Raises StoppedOnRequest while there is nothing to save; Ctrl-C twice is always meant."""
        if self.number is None:
            self.number, self._first_s = number, self._clock()
            self.tell()
            if not self.training:
                if self.speaks:
                    text = f"stopped by {signal.Signals(number).name} before training began: there is nothing to save"
                    with contextlib.suppress(OSError):  # a terminal that has closed
                        os.write(2, f"pretrain_gpt.py: {text}\n".encode())
                raise StoppedOnRequest(STOPPED)
        elif number == signal.SIGINT or self._clock() - self._first_s > REPEAT_S:
            end_now(128 + number)
