"""Limits of time: of the whole examination, and of each call that may never return."""

import subprocess
import threading
import time
from collections.abc import Callable, Sequence


class Deadline:
    """When the examination must be over, by this process's monotonic clock."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._end = time.monotonic() + limit_s

    def left_s(self, at_most: float = float("inf")) -> float:
        """Seconds left, not below 0 nor above ``at_most``."""
        return max(0.0, min(at_most, self._end - time.monotonic()))


def within[T](limit_s: float, call: Callable[[], T]) -> T:
    """``call()`` in a thread of its own. Raises TimeoutError when it does not return in time, else what it raises.

    The thread is left behind: a name server or a file system that hangs cannot be interrupted.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {limit_s:.0f} s")
    return results[0]


def output_of(command: Sequence[str], limit_s: float) -> str:
    """The standard output of ``command``. Raises OSError with its words when it fails, is not there, or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, errors="replace")
    except FileNotFoundError:
        raise OSError(f"no {command[0]} on the PATH") from None
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{command[0]} did not answer within {limit_s:.0f} s") from None
    if done.returncode:
        words = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        raise OSError(f"{command[0]}: {words[-1]}")
    return done.stdout
