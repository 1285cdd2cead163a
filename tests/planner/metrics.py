"""How good predictions are: errors, order, regret, memory."""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.planner.rows import PublishedRun

CLOSE = 0.05
"""Two layouts whose measured times are closer than this share have no order: the same run differs by as much."""
FEWEST = 4
"""Layouts of one model, cluster and batch that make a choice worth judging."""


@dataclass(slots=True, frozen=True)
class Errors:
    """Of predicted against measured seconds, as shares; a missing prediction counts as 1."""

    count: int
    mean: float
    median: float
    p90: float
    bias: float


def errors(rows: Sequence[PublishedRun], predicted: NDArray[np.float64]) -> Errors:
    """Rows without a measured time are left out."""
    measured = np.array([row.measured_s or math.nan for row in rows])
    known = ~np.isnan(measured)
    off = np.where(np.isfinite(predicted), predicted / measured - 1, 1.0)[known]
    if not len(off):
        return Errors(0, math.nan, math.nan, math.nan, math.nan)
    size = np.abs(off)
    return Errors(
        len(off), float(size.mean()), float(np.median(size)), float(np.quantile(size, 0.9)), float(off.mean())
    )


@dataclass(slots=True, frozen=True)
class Order:
    """Whether the faster of two layouts is found, and what the choice of the best costs."""

    pairs: int
    right: float
    """Share of pairs of one model, cluster and batch that are more than 5 % apart."""
    groups: int
    top1: float
    """Mean over groups of at least four layouts: the time of the one predicted best over the best measured, minus 1."""
    top3: float
    """The same of the best among the three predicted best."""


def order(rows: Sequence[PublishedRun], predicted: NDArray[np.float64]) -> Order:
    """Inside one model, cluster and batch only: times of different ones say nothing of layouts."""
    pairs = right = 0
    top1, top3 = [], []
    for numbers in grouped(rows, lambda row: row.problem).values():
        known = [number for number in numbers if rows[number].measured_s]
        if len(known) < FEWEST:
            continue
        times = [(float(predicted[number]), rows[number].measured_s or 0.0) for number in known]
        for place, (guess, truth) in enumerate(times):
            for other_guess, other_truth in times[:place]:
                if abs(truth / other_truth - 1) > CLOSE:
                    pairs += 1
                    right += (guess < other_guess) == (truth < other_truth)
        best, chosen = min(truth for _, truth in times), [truth for _, truth in sorted(times)]
        top1.append(chosen[0] / best - 1)
        top3.append(min(chosen[:3]) / best - 1)
    if not top1:
        return Order(0, math.nan, 0, math.nan, math.nan)
    return Order(pairs, right / pairs if pairs else math.nan, len(top1), float(np.mean(top1)), float(np.mean(top3)))


def grouped(rows: Sequence[PublishedRun], key: Callable[[PublishedRun], Hashable]) -> dict[Hashable, list[int]]:
    """Numbers of the rows with the same key."""
    found: dict[Hashable, list[int]] = {}
    for number, row in enumerate(rows):
        found.setdefault(key(row), []).append(number)
    return found


@dataclass(slots=True, frozen=True)
class MemoryErrors:
    """Of predicted against published bytes, and of the warning at 80 % of the card."""

    count: int
    mean: float
    median: float
    failed: int
    flagged_failed: int
    succeeded: int
    flagged_succeeded: int


def memory_errors(rows: Sequence[PublishedRun], predicted: NDArray[np.float64], safe_share: float) -> MemoryErrors:
    """Runs that are known to have succeeded are those with a measured time or peak."""
    card = np.array([row.case.machine.memory_bytes for row in rows])
    flagged = predicted > safe_share * card
    known = np.array([row.memory_bytes is not None for row in rows])
    failed = np.array([row.out_of_memory for row in rows])
    succeeded = np.array([row.measured_s is not None for row in rows]) & ~failed
    truth = np.array([row.memory_bytes or math.nan for row in rows])
    off = np.abs(predicted / truth - 1)[known & (truth > 0)]
    return MemoryErrors(
        len(off), float(off.mean()) if len(off) else math.nan, float(np.median(off)) if len(off) else math.nan,
        int(failed.sum()), int((failed & flagged).sum()), int(succeeded.sum()), int((succeeded & flagged).sum()),
    )  # fmt: skip
