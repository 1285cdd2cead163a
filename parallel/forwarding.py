"""Signals to a program that has started ranks, handed on to them."""

import contextlib
import os
import signal
from collections.abc import Collection, Iterator

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)


class Forwarding:
    """Forwards INT and HUP (as TERM), TERM and USR2 to the ranks, which save and end. A second Ctrl-C kills them.

    Signals that come while ranks are started wait until all are: what a handler raises within os.fork, from the
    callbacks of libraries, is printed and lost. A signal mask would not do, since any other thread may take the signal.
    """

    def __init__(self) -> None:
        self.ending: list[int] = []
        """Signals to end the run, in the order in which they were handed on."""
        self.waiting: list[int] = []
        self.pids: Collection[int] | None = None
        handled = [
            number for number in FORWARDED if signal.getsignal(number) is not signal.SIG_IGN
        ]  # nohup ignores HUP
        self.before = {number: signal.signal(number, self._take) for number in handled}

    def _take(self, number: int, _frame: object) -> None:
        self.waiting.append(number)
        self._send()

    def forward_to(self, pids: Collection[int]) -> None:
        """From now on, and what waits."""
        self.pids = pids
        self._send()

    def _send(self) -> None:
        while self.pids is not None and self.waiting:
            number = self.waiting.pop(0)
            again = number == signal.SIGINT and signal.SIGINT in self.ending
            if number != signal.SIGUSR2:
                self.ending.append(number)
            sent = signal.SIGKILL if again else number if number == signal.SIGUSR2 else signal.SIGTERM
            for pid in self.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, sent)

    def restore(self) -> None:
        """The handlers from before."""
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def leave(self, of_parent: int) -> None:
        """In a forked rank: the handlers from before, which then hear what came since the fork.

        of_parent: how many signals waited before the fork; the parent hands them on itself.
        """
        self.before.pop(signal.SIGINT, None)  # a rank ignores it
        self.restore()
        for number in self.waiting[of_parent:]:
            if number != signal.SIGINT:
                os.kill(os.getpid(), number)


@contextlib.contextmanager
def forwarding() -> Iterator[Forwarding]:
    signals = Forwarding()
    try:
        yield signals
    finally:
        signals.restore()
