"""What a pipeline stage holds of chunks of different sizes.

Interleaved, a stage passes PP microbatches through its first chunk, as many through the second, and so on; backward
through the last first (arXiv:2104.04473, section 2.2). Where chunks differ it holds most not when its warm-up ends, but
when the next round's large chunks have come in and only small ones have been given back.
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple

ROUNDS = 3
"""Of PP microbatches each, after which all repeats itself."""


class Crowding(NamedTuple):
    """Blocks held, over what as many chunks of the mean size would be."""

    most: float = 1.0
    at_the_end: float = 1.0
    """While the last chunk is at work, where the last stage has the loss."""
    at_the_start: float = 1.0
    """As a backward pass of the first chunk ends, where the first stage has the embedding."""


@cache
def crowding(sizes: tuple[int, ...], stage: int, pp: int, microbatches: int) -> Crowding:
    """Of one stage, at most.

    sizes: blocks of each chunk of this stage, first to last.
    """
    vpp, rounds = len(sizes), max(1, min(ROUNDS, microbatches // pp))
    forward, backward = _held(sizes, pp, rounds), _held(sizes[::-1], pp, rounds)
    warmed_up = min(2 * (pp - stage - 1) + (vpp - 1) * pp + 1, len(forward) - 1)
    mean = warmed_up * sum(sizes) / vpp
    if not mean:
        return Crowding()
    came = forward[warmed_up:] + forward[-1:] * warmed_up  # and nothing more, while the last ones are given back
    before = [each - gone for each, gone in zip(came, backward, strict=False)]
    turn = [number // pp % vpp for number in range(len(before))]  # of the chunk that is given back, the last one first
    last = [held for held, own in zip(before, turn, strict=True) if own == 0]
    first = [held - sizes[0] for held, own in zip(before, turn, strict=True) if own == vpp - 1]
    return Crowding(max(before) / mean, max(last) / mean, max(first) / mean)


def _held(sizes: Sequence[int], pp: int, rounds: int) -> list[int]:
    """After so many passes, none first."""
    return list(accumulate([size for _ in range(rounds) for size in sizes for _ in range(pp)], initial=0))
