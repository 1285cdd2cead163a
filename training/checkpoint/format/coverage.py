"""Whether pieces cover a tensor exactly once, in time linear in their number.

Every index of every dim gets a random number; a rectangle's weight is the product, over the dims, of the sum of the
numbers of its indices. These products are the terms of (sum of dim 0) x (sum of dim 1) x ... multiplied out, grouped
by rectangle, so the weights of an exact cover add up to the weight of the whole. Modulo a prime near 2^61, a hole and
an overlap of equal volume go unnoticed with a chance of about dims / 2^61 (Schwartz and Zippel).

Comparing all pairs, as torch's planner does, takes half an hour for 405B on 16,384 ranks.
"""

import functools
import itertools
import math
import random
from collections.abc import Iterable

PRIME = (1 << 61) - 1

# One seed for the process: a thread that computes sums again (two at once, or after eviction) gets the same numbers.
_SEED = random.SystemRandom().getrandbits(64)


def covered_once(shape: tuple[int, ...], pieces: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether rectangles (offset, shape) within a tensor of ``shape`` hold each of its elements exactly once."""
    total, volume, whole_volume = 0, 0, math.prod(shape)
    for offset, size in pieces:
        if len(offset) != len(shape) or any(
            start < 0 or length < 0 or start + length > whole
            for start, length, whole in zip(offset, size, shape, strict=True)
        ):
            return False
        volume += math.prod(size)
        if size == shape or volume > whole_volume or not whole_volume:  # no sums over a dim that nothing lies along
            continue
        total += _weight(shape, offset, size)
    if volume != whole_volume or not whole_volume:
        return volume == whole_volume
    if not total:  # one piece that is the whole
        return True
    return total % PRIME == _weight(shape, (0,) * len(shape), shape) % PRIME


def _weight(shape: tuple[int, ...], offset: tuple[int, ...], size: tuple[int, ...]) -> int:
    dims = zip(shape, offset, size, strict=True)
    sums = (_prefix_sums(dim, whole) for dim, whole in enumerate(shape))
    return math.prod(sums[start + length] - sums[start] for sums, (_, start, length) in zip(sums, dims, strict=True))


@functools.lru_cache(maxsize=64)
def _prefix_sums(dim: int, length: int) -> list[int]:
    """Sums of the first 0, 1, ... length random numbers of a dim: [length + 1]."""
    draw = random.Random(f"{_SEED} {dim} {length}")
    return list(itertools.accumulate((draw.getrandbits(60) for _ in range(length)), initial=0))
