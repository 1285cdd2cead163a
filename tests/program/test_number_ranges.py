"""Ranges of numbers as recipes list them."""

import pytest

from program.number_ranges import listed, problems, read_ranges


def test_ranges_are_read_in_any_order_and_overlap() -> None:
    assert read_ranges(()) == ()
    assert read_ranges((7, "3-5", "6", "100000-100002", "4-4")) == ((3, 8), (100_000, 100_003))
    assert read_ranges(("1-9", "2-3", "11")) == ((1, 10), (11, 12))
    assert listed(((3, 8), (100_000, 100_001))) == "3-7, 100,000"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("a",), "found 'a'"),
        (("5-3",), 'found "5-3", which ends before it begins'),
        ((-1,), "found -1"),
        (("1-2-3",), "found '1-2-3'"),
        (("1_0",), "found '1_0'"),
        (("1" * 25,), "found '1111"),
        ((0,), "expected numbers from 1 to 1,000,000,000,000, found 0."),
        (("7-9999999999999",), "found 7-9,999,999,999,999."),
    ],
)
def test_what_is_no_range_is_one_problem(given: tuple[int | str, ...], words: str) -> None:
    [problem] = problems("train.some", given, 1)
    assert problem.startswith("train.some: expected numbers") and words in problem
