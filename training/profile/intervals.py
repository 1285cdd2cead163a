"""Sets of moments: sorted, disjoint intervals (begin, end) of one clock."""

from collections.abc import Iterable

from program.number_ranges import merged

Interval = tuple[float, float]


def union(spans: Iterable[Interval]) -> list[Interval]:
    """All that lies in at least one of them."""
    return list(merged(span for span in spans if span[1] > span[0]))


def without(first: Iterable[Interval], second: Iterable[Interval]) -> list[Interval]:
    """What lies in ``first`` and not in ``second``; both are unions."""
    found: list[Interval] = []
    others, at = list(second), 0
    for begin, end in first:
        while at < len(others) and others[at][1] <= begin:
            at += 1
        here = at
        while here < len(others) and others[here][0] < end:
            if others[here][0] > begin:
                found.append((begin, others[here][0]))
            begin = max(begin, others[here][1])
            here += 1
        if begin < end:
            found.append((begin, end))
    return found


def within(spans: Iterable[Interval], bounds: Interval) -> list[Interval]:
    """What lies in a union and within the bounds."""
    cut = ((max(begin, bounds[0]), min(end, bounds[1])) for begin, end in spans)
    return [(begin, end) for begin, end in cut if begin < end]


def length(spans: Iterable[Interval]) -> float:
    """Of a union."""
    return sum(end - begin for begin, end in spans)
