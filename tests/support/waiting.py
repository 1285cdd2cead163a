"""Wait for what another process does."""

import time
from collections.abc import Callable


def until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    """Poll ``condition``; an AssertionError after ``within_s`` guards against hanging, and measures nothing."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
