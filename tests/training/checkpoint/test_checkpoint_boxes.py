"""Flat ranges as rectangles."""

import math
import random

import pytest

from parallel.regions import flat_boxes

SHAPES = [(7,), (5, 4), (1, 6), (6, 1), (3, 4, 5), (4, 1, 3), (2, 3, 2, 3), (1, 1, 5)]


def elements(shape: tuple[int, ...], offset: tuple[int, ...], size: tuple[int, ...]) -> list[int]:
    """Flat indices of a rectangle, in its own row-major order."""
    if not shape:
        return [0]
    inner = math.prod(shape[1:])
    rest = elements(shape[1:], offset[1:], size[1:])
    return [(offset[0] + row) * inner + index for row in range(size[0]) for index in rest]


@pytest.mark.parametrize("shape", SHAPES)
def test_boxes_cover_a_range_once_in_memory_order_with_few_pieces(shape: tuple[int, ...]) -> None:
    numel = math.prod(shape)
    choice = random.Random(0)
    for _ in range(60):
        start, end = sorted(choice.choices(range(numel + 1), k=2))
        boxes = flat_boxes(shape, start, end)
        assert [index for box in boxes for index in elements(shape, box.offset, box.shape)] == list(range(start, end))
        assert all(elements(shape, box.offset, box.shape)[0] == box.start for box in boxes)
        assert len(boxes) <= 2 * len(shape) - 1


def test_a_whole_tensor_is_one_box() -> None:
    assert flat_boxes((3, 4), 0, 12) == [((0, 0), (3, 4), 0)]
    assert flat_boxes((), 0, 1) == [((), (), 0)]
