"""Which of several nodes' answers counts, and which numbers fall out of the row."""

import statistics
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence


def deciding[T: Hashable](values: Sequence[T]) -> T:
    """The value that more than half have; without one, the first's (the first node's, in the order of ranks)."""
    value, count = Counter(values).most_common(1)[0]
    return value if 2 * count > len(values) else values[0]


def shares_of_median(values: Mapping[str, float]) -> dict[str, float]:
    """Each value divided by the median of all; empty for fewer than two values or a median of 0."""
    if len(values) < 2:
        return {}
    median = statistics.median(values.values())
    return {name: value / median for name, value in values.items()} if median > 0 else {}
