"""Runs a sink that training can do without: it may be slow, hang or fail, and training goes on."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Protocol

from training.metrics.redaction import without_secrets
from training.metrics.values import Value, Values

MOST_NUMBERS = 1_000_000
"""That wait for a sink, some 100 MB. A line has about 30, and one for each expert of each block."""


class Sink(Protocol):
    """Somewhere a logged iteration's numbers go."""

    def write(self, iteration: int, values: Values) -> None:
        """Take the numbers of ``iteration``, by their key in metrics.jsonl (docs/metrics.md)."""
        ...

    def close(self) -> None:
        """Bring what was written to where it belongs; no write follows."""
        ...


class BackgroundSink:
    """A sink that is opened, written to and closed by a thread of its own.

    Its first exception is said in one line and ends it: later writes are dropped. What it has not taken yet waits in
    memory; lines for which there is no room are dropped, and the first of them is said.
    """

    def __init__(
        self,
        name: str,
        open_inner: Callable[[], Sink],
        say: Callable[[str], None],
        close_timeout_s: float = 45.0,
        beat: Callable[[], None] = lambda: None,
        most_numbers: int = MOST_NUMBERS,
    ) -> None:
        """``name`` and ``say`` are for the message; ``close_timeout_s`` is all that ``close`` waits for.

        beat: called every second of that wait, which is no hang.
        """
        self._name, self._say, self._close_timeout_s, self._beat = name, say, close_timeout_s, beat
        self._most_numbers, self._waiting, self._lock, self._dropped = most_numbers, 0, Lock(), 0
        self._lines: SimpleQueue[tuple[int, Values, int] | None] = SimpleQueue()
        self._ended_s: float | None = None
        # A daemon: if it hangs in the network, the process ends all the same.
        self._left_behind = False
        self._thread = Thread(target=self._work, args=(open_inner,), name=f"metrics-{name}", daemon=True)
        self._thread.start()

    def write(self, iteration: int, values: Values) -> None:
        """Hand the line over; never blocks and never raises."""
        if not self._thread.is_alive():
            return
        numbers = sum(map(count_numbers, values.values()))
        if self._count(numbers):
            self._lines.put((iteration, dict(values), numbers))
            return
        if not self._dropped:
            self._say(
                f"{self._name} is too slow: {self._most_numbers:,} numbers wait for it, and lines from iteration "
                f"{iteration} on are dropped while they do. Training goes on; metrics.jsonl has every number."
            )
        self._dropped += 1

    def end(self) -> None:
        """No write follows: the thread ends once it has taken all. Does not wait: several sinks end side by side."""
        if self._ended_s is None:
            self._ended_s = time.monotonic()
            self._lines.put(None)

    def close(self) -> None:
        """Let the thread take all that was written, and end; wait ``close_timeout_s`` from ``end`` on."""
        self.end()
        assert self._ended_s is not None
        end_s = self._ended_s + self._close_timeout_s
        while self._thread.is_alive() and (left_s := end_s - time.monotonic()) > 0:
            self._thread.join(min(1.0, left_s))
            self._beat()
        if self._thread.is_alive():
            self._left_behind = True
            self._say(
                f"{self._name} did not finish within {self._close_timeout_s:.0f} s and was left behind; "
                "metrics.jsonl has every number."
            )

    def _count(self, numbers: int) -> bool:
        """Whether there is room for a line of so many; they wait from here on. One line is taken whatever its size."""
        with self._lock:
            room = not self._waiting or self._waiting + numbers <= self._most_numbers
            self._waiting += numbers if room else 0
        return room

    def _work(self, open_inner: Callable[[], Sink]) -> None:
        try:
            inner = open_inner()
            for iteration, values, numbers in iter(self._lines.get, None):
                inner.write(iteration, values)
                with self._lock:
                    self._waiting -= numbers
            inner.close()
        except Exception as error:
            if self._left_behind:
                return  # already said; what fails now fails because the process ends
            reason = without_secrets(next(iter(str(error).splitlines()), ""), os.environ)
            self._say(
                f"{self._name} is off for the rest of this run ({type(error).__name__}: {reason}). "
                "Training goes on; metrics.jsonl has every number."
            )


def count_numbers(value: Value) -> int:
    """Of one entry of a line."""
    if isinstance(value, Mapping):
        return sum(map(count_numbers, value.values()))
    return len(value) if isinstance(value, Sequence) else 1
