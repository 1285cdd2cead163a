"""Garbage is collected every N iterations, and not between."""

import gc
from typing import Any

from training.parts.manual_gc import ManualGC
from training.progress import Progress


def test_it_is_collected_every_n_iterations_and_not_between() -> None:
    class Loop:
        """Refers to itself, so that only a collection frees it."""

    def garbage() -> int:
        """Cycles that are not collected yet."""
        return sum(type(one) is Loop for one in gc.get_objects())

    callback = ManualGC(3)
    callback.start(Progress(iteration=0, consumed_samples=0))
    try:
        left = []
        for iteration in range(1, 7):
            loop: Any = Loop()
            loop.itself = loop
            del loop
            callback.after_step(Progress(iteration=iteration, consumed_samples=0), None)  # type: ignore[arg-type]
            left.append(garbage())
        assert left == [1, 2, 0, 1, 2, 0] and not gc.isenabled()
    finally:
        callback.stop(Progress(iteration=6, consumed_samples=0), "done")
    assert gc.isenabled()
