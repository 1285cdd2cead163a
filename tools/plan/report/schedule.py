"""The passes of one step in the order of Megatron's schedules, each when what it needs is there."""

from collections.abc import Sequence
from typing import NamedTuple

from models.costs.candidate import Candidate


class Work(NamedTuple):
    """One pass of one chunk on one stage."""

    stage: int
    chunk: int
    microbatch: int
    backward: bool
    start: float
    end: float


class Seconds(NamedTuple):
    """Of one microbatch's passes through each chunk of the model, first to last: chunk c of stage s is c x PP + s."""

    forward: Sequence[float]
    backward: Sequence[float]
    exchange: float = 0.0
    """After each pass, that its stage neither computes nor hides: it hands over what it has, or takes what is next."""


def schedule(layout: Candidate, seconds: Seconds) -> list[Work]:
    """All passes with their times.

    Each stage works through Megatron's order (arXiv:2104.04473, figure 4), and waits for what its next pass needs.
    """
    orders = [_order(layout, stage) for stage in range(layout.pp)]
    done: dict[tuple[int, int, bool], float] = {}
    free, place, found = [0.0] * layout.pp, [0] * layout.pp, []
    awake = list(range(layout.pp))
    while awake:
        stage = awake.pop()
        before = place[stage]
        while place[stage] < len(orders[stage]):
            chunk, microbatch, back = orders[stage][place[stage]]
            number = chunk * layout.pp + stage
            ready = _ready(layout, number, microbatch, back, done)
            if ready is None:
                break
            start = max(free[stage], ready)
            end = start + (seconds.backward if back else seconds.forward)[number]
            done[number, microbatch, back] = free[stage] = end + seconds.exchange
            found.append(Work(stage, chunk, microbatch, back, start, end))
            place[stage] += 1
        if place[stage] > before:  # its neighbours may have waited for that
            awake += [(stage - 1) % layout.pp, (stage + 1) % layout.pp]
    return found


def _ready(
    layout: Candidate, chunk: int, microbatch: int, back: bool, done: dict[tuple[int, int, bool], float]
) -> float | None:
    """When the pass before it ends, on another stage or on this; None where that has not been worked out."""
    last = layout.pp * layout.vpp - 1
    if back:
        return done.get((chunk, microbatch, False) if chunk == last else (chunk + 1, microbatch, True))
    return 0.0 if chunk == 0 else done.get((chunk - 1, microbatch, False))


def _order(layout: Candidate, stage: int) -> list[tuple[int, int, bool]]:
    """(chunk, microbatch, backward) of one stage: warm-up, then one forward and one backward, then the rest."""
    count = layout.microbatches * layout.vpp
    warm = min(
        count, (layout.pp - stage - 1) * 2 + (layout.vpp - 1) * layout.pp if layout.vpp > 1 else layout.pp - stage - 1
    )
    forwards = [(*_turn(layout, number, False), False) for number in range(count)]
    backwards = [(*_turn(layout, number, True), True) for number in range(count)]
    found = forwards[:warm]
    for number in range(count - warm):
        found += [forwards[warm + number], backwards[number]]
    return found + backwards[count - warm :]


def _turn(layout: Candidate, number: int, back: bool) -> tuple[int, int]:
    """Chunk and microbatch of a stage's so many-th pass: rounds of PP microbatches, chunk after chunk."""
    if layout.vpp == 1:
        return 0, number
    rounds, inside = divmod(number, layout.pp * layout.vpp)
    chunk, microbatch = divmod(inside, layout.pp)
    return (layout.vpp - 1 - chunk if back else chunk), rounds * layout.pp + microbatch
