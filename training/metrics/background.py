"""Runs a sink that training can do without: it may be slow, hang or fail, and training goes on."""

import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Protocol

from training.metrics.values import Values


class Inner(Protocol):
    """What is run in the background; see ``sinks.Sink``."""

    def write(self, iteration: int, values: Values) -> None: ...
    def close(self) -> None: ...


class BackgroundSink:
    """A sink that is opened, written to and closed by a thread of its own.

    Its first exception is said in one line and ends it: later writes are dropped. What it has not taken yet
    waits in memory, about 1 KB a line.
    """

    def __init__(
        self,
        name: str,
        open_inner: Callable[[], Inner],
        say: Callable[[str], None],
        close_timeout_s: float = 45.0,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """``name`` and ``say`` are for the message; ``close_timeout_s`` is all that ``close`` waits for.

        beat: called every second of that wait, which is no hang.
        """
        self._name, self._say, self._close_timeout_s, self._beat = name, say, close_timeout_s, beat
        self._lines: SimpleQueue[tuple[int, Values] | None] = SimpleQueue()
        # A daemon: if it hangs in the network, the process ends all the same.
        self._left_behind = False
        self._thread = Thread(target=self._work, args=(open_inner,), name=f"metrics-{name}", daemon=True)
        self._thread.start()

    def write(self, iteration: int, values: Values) -> None:
        """Hand the line over; never blocks and never raises."""
        if self._thread.is_alive():
            self._lines.put((iteration, dict(values)))

    def close(self) -> None:
        """Let the thread take all that was written, and end."""
        self._lines.put(None)
        end_s = time.monotonic() + self._close_timeout_s
        while self._thread.is_alive() and (left_s := end_s - time.monotonic()) > 0:
            self._thread.join(min(1.0, left_s))
            self._beat()
        if self._thread.is_alive():
            self._left_behind = True
            self._say(
                f"{self._name} did not finish within {self._close_timeout_s:.0f} s and was left behind; "
                "metrics.jsonl has every number."
            )

    def _work(self, open_inner: Callable[[], Inner]) -> None:
        try:
            inner = open_inner()
            for iteration, values in iter(self._lines.get, None):
                inner.write(iteration, values)
            inner.close()
        except Exception as error:
            if self._left_behind:
                return  # already said; what fails now fails because the process ends
            reason = next(iter(str(error).splitlines()), "")
            self._say(
                f"{self._name} is off for the rest of this run ({type(error).__name__}: {reason}). "
                "Training goes on; metrics.jsonl has every number."
            )
