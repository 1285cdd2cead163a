"""Where each parameter lies in the flat memory of DeepSpeed's ranks.

ZeRO-1 and 2: of each parameter group, one after another, some with padding behind them; all of it is cut into a part
for each rank. ZeRO-3: each parameter is cut into a part for each rank, all equally long; a rank's parts lie one after
another, which is cut into sub-groups. (DeepSpeed 0.19.8: utils/zero_to_fp32.py, runtime/zero/stage_1_and_2.py.)
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from program.errors import UserError
from tools.reshard.assembled import rectangles_of_range
from tools.reshard.torch_file import StridedView

Piece = tuple[tuple[int, ...], StridedView]
Shapes = Mapping[str, tuple[int, ...]]


def of_groups(
    shapes: Shapes, paddings: Sequence[int], parts: Sequence[StridedView], folder: Path
) -> dict[str, list[Piece]]:
    """ZeRO-1 and 2: the pieces of a parameter group's tensors. parts: each rank's."""
    found: dict[str, list[Piece]] = {}
    start = 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        size = math.prod(shape)
        found[name] = list(_pieces(shape, _ranges(parts, start, size, folder, name)))
        start += size + padding
    return found


def _ranges(
    parts: Sequence[StridedView], start: int, size: int, folder: Path, name: str
) -> Iterator[tuple[int, StridedView]]:
    """Elements [start, start + size) of parts that follow one another: each stretch with its number in the tensor."""
    before, rest = 0, size
    for part in parts:
        (length,) = part.shape
        low, high = max(start, before), min(start + size, before + length)
        if low < high:
            yield low - start, part.part((low - before,), (high - low,))
            rest -= high - low
        before += length
    if rest:
        raise UserError(f"{folder}: its ranks' memory ends before {name} does. Copy all ranks' files.")


def of_ranks(shapes: Shapes, parts: Sequence[Sequence[StridedView]], folder: Path) -> dict[str, list[Piece]]:
    """ZeRO-3: the pieces of all tensors. parts: each rank's sub-groups."""
    found: dict[str, list[Piece]] = {}
    start, ranks = 0, len(parts)
    for name, shape in shapes.items():
        size = math.prod(shape)
        own = -(-size // ranks)
        found[name] = []
        for rank, groups in enumerate(parts):
            held = min(own, size - rank * own)  # the last ranks have padding
            if held > 0:
                ranges = _ranges(groups, start, held, folder, name)
                found[name] += _pieces(shape, ((rank * own + at, view) for at, view in ranges))
        start += own
    return found


def _pieces(shape: tuple[int, ...], ranges: Iterator[tuple[int, StridedView]]) -> Iterator[Piece]:
    """Stretches of a tensor's elements as rectangles of it."""
    for at, view in ranges:
        (length,) = view.shape
        for first, (offset, size) in rectangles_of_range(shape, at, at + length):
            strides = tuple(math.prod(size[dim + 1 :]) for dim in range(len(size)))
            yield offset, view.part((first - at,), (math.prod(size),)).reshaped(size, strides)
