"""Gaps in an order, against counting them out one by one."""

from random import Random

import numpy as np
import pytest

from data.gaps import NO_GAPS, Gaps, continued
from program.number_ranges import merged

LENGTH = 120


def drawn(draw: Random) -> tuple[tuple[int, int], ...]:
    begins = [draw.randrange(LENGTH) for _ in range(draw.randrange(5))]
    return merged((begin, begin + draw.randint(1, 25)) for begin in begins)


def counted_out(gaps: tuple[tuple[int, int], ...], first: int = 0) -> list[int]:
    """The numbers from ``first`` on that lie in no gap."""
    return [number for number in range(first, 4 * LENGTH) if not any(begin <= number < end for begin, end in gaps)]


@pytest.mark.parametrize("seed", range(40))
def test_positions_are_the_numbers_outside_of_gaps(seed: int) -> None:
    ranges = drawn(Random(seed))
    gaps, expected = Gaps(ranges), counted_out(ranges)
    assert gaps.positions(np.arange(len(expected))).tolist() == expected
    for consumed, position in enumerate(expected):
        assert gaps.behind(consumed + 1) == position + 1
        assert gaps.met(consumed + 1) == tuple(one for one in ranges if one[1] <= position)
    assert (gaps.behind(0), gaps.met(0)) == (0, ())


@pytest.mark.parametrize("seed", range(40))
def test_other_gaps_hold_from_where_the_run_is(seed: int) -> None:
    """What was met stays, what was trained on is said, what lies ahead is the new recipe's; and again."""
    draw = Random(seed)
    taken, met, consumed = list[int](), tuple[tuple[int, int], ...](), 0
    for _ in range(4):
        given = drawn(draw)
        gaps, trained = continued(met, given, consumed)
        here = taken[-1] + 1 if taken else 0
        assert gaps.positions(np.arange(consumed)).tolist() == taken
        late = {number for first, end in given for number in range(first, min(end, here))} & set(taken)
        assert late <= {number for first, end in trained for number in range(first, end)}
        assert bool(trained) == bool(late)
        more = draw.randrange(1, 30)
        taken += counted_out(given, here)[:more]
        consumed += more
        met = gaps.met(consumed)
    assert continued(met, (), consumed)[0].ranges == met
    assert NO_GAPS.behind(7) == 7
