"""A hook: what a measured timeline asks of the device behind its step. ``timeline-RANK.txt`` in EMULATED_CUDA_TIMELINE.

To be named behind step_record, and written as it writes.
"""

import os
from pathlib import Path
from typing import Any

from tests.gpu_path import flight
from tests.gpu_path.counters import counts
from tests.gpu_path.step_record import NOT_COUNTED, folded, host_waits
from training.profile.timeline import TimelineCallback

after_step = TimelineCallback.after_step


def recorded(callback: TimelineCallback, *args: Any) -> None:
    """In place of the callback's."""
    if callback.clock is None:
        after_step(callback, *args)
        return
    newest, before = flight.last(), counts()
    with host_waits() as waits:
        after_step(callback, *args)
    after = counts()
    lines = [f"{after[kind] - before[kind]} {kind.name}" for kind in after if kind not in NOT_COUNTED]
    lines += [f"{number} waits: {where}" for where, number in sorted(waits.items())]
    lines += folded([str(call) for call in flight.since(newest)])
    path = Path(os.environ["EMULATED_CUDA_TIMELINE"], f"timeline-{os.environ['RANK']}.txt")
    path.write_text("\n".join(lines) + "\n")


TimelineCallback.after_step = recorded  # type: ignore[assignment, method-assign]
