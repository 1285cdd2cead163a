"""Clocks of the nodes against the first node's."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tools.doctor.finding import Finding, NodeFacts, judged

GROUP = "clocks"
TURNS = 5
LATE_S, WRONG_S = 1.0, 30.0
"""A second makes logs hard to read side by side; half a minute breaks credentials (munge, Kerberos, TLS) and builds
that compare times of files."""


def offset(ask: Callable[[], dict[str, Any] | None], clock: Callable[[], float]) -> tuple[float, float] | None:
    """(seconds that the other clock is ahead, at most so much in error): from the quickest of some round trips."""
    best: tuple[float, float] | None = None
    for _ in range(TURNS):
        began, before = time.monotonic(), clock()
        answer = ask()
        trip = time.monotonic() - began
        if answer is None or "time" not in answer:
            return best
        if best is None or trip / 2 < best[1]:
            best = answer["time"] - (before + trip / 2), trip / 2
    return best


def evaluate(offsets: Mapping[int, tuple[float, float]], seen: Sequence[NodeFacts]) -> list[tuple[str, Finding]]:
    """Wrong beyond ``WRONG_S``."""
    if offsets and all(abs(seconds) <= LATE_S for seconds, _ in offsets.values()):
        largest = max(abs(seconds) for seconds, _ in offsets.values())
        return [("", judged(GROUP, "between nodes", "ok", f"{largest * 1e3:.2f} ms apart at most"))]
    return [(one.node, _one(*offsets[one.rank])) for one in seen if one.rank in offsets]


def _one(seconds: float, error_s: float) -> Finding:
    found = f"{abs(seconds):.1f} s {'ahead of' if seconds > 0 else 'behind'} the first node (± {error_s * 1e3:.1f} ms)"
    if abs(seconds) <= LATE_S:
        return judged(GROUP, "between nodes", "ok", "within a second of the first node")
    expected, fix = f"within {LATE_S:.0f} s", "set the clock: chronyc makestep, or systemctl restart chronyd"
    return judged(GROUP, "between nodes", "wrong" if abs(seconds) > WRONG_S else "warning", found, expected, fix)
