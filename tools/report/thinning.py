"""Fewer points than pixels, without losing one that stands out."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from tools.shared.plot import Point


def thinned(xs: Sequence[float], ys: Sequence[float], columns: int) -> list[Point]:
    """The lowest and the highest point of each stretch, in their order, a stretch for each column of pixels.

    No spike is lost, and a gap (NaN) stays one. Fast: a stretch is looked through by min and max.
    """
    if len(xs) <= 2 * columns:
        return list(map(Point, xs, ys))
    found: list[Point] = []
    for first, end in _stretches(len(xs), columns):
        part = ys[first:end]
        finite = [y for y in part if math.isfinite(y)] if not math.isfinite(sum(part)) else part
        if len(finite) < len(part):
            found.append(Point(xs[first], math.nan))
        if finite:
            found += (
                Point(xs[place], ys[place])
                for place in sorted({first + part.index(edge(finite)) for edge in (min, max)})
            )
    return found


def averaged(xs: Sequence[float], ys: Sequence[float], columns: int) -> list[Point]:
    """The mean of each stretch, at its middle; stretches without a finite value are left out."""
    found = []
    for first, end in _stretches(len(xs), min(columns, len(xs))):
        part = [y for y in ys[first:end] if math.isfinite(y)]
        if part:
            found.append(Point((xs[first] + xs[end - 1]) / 2, sum(part) / len(part)))
    return found


def _stretches(size: int, count: int) -> Iterator[tuple[int, int]]:
    edges = [place * size // count for place in range(count + 1)]
    return pairwise(edges)
