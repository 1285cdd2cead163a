"""The pipeline of one step as Megatron's schedules run it: forward, backward, idle. No torch here."""

import dataclasses
from typing import NamedTuple

from tools.plan.page.svg import Drawing
from tools.plan.pricing import Plan
from training.memory.layouts import Candidate

MOST_STAGES = 16
MOST_MICROBATCHES = 24


class Work(NamedTuple):
    """One pass of one chunk on one stage."""

    stage: int
    chunk: int
    microbatch: int
    backward: bool
    start: float
    end: float


def schedule(layout: Candidate, forward: float, backward: float) -> list[Work]:
    """All passes with their times. forward, backward: seconds of one chunk.

    Each stage works through Megatron's order (arXiv:2104.04473, figure 4), and waits for what its next pass needs.
    """
    orders = [_order(layout, stage) for stage in range(layout.pp)]
    done: dict[tuple[int, int, bool], float] = {}
    free, place, found = [0.0] * layout.pp, [0] * layout.pp, []
    left = sum(map(len, orders))
    while left:
        for stage, order in enumerate(orders):
            while place[stage] < len(order):
                chunk, microbatch, back = order[place[stage]]
                ready = _ready(layout, chunk * layout.pp + stage, microbatch, back, done)
                if ready is None:
                    break
                start = max(free[stage], ready)
                end = start + (backward if back else forward)
                done[chunk * layout.pp + stage, microbatch, back] = free[stage] = end
                found.append(Work(stage, chunk, microbatch, back, start, end))
                place[stage], left = place[stage] + 1, left - 1
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


def timeline(plan: Plan) -> str:
    """A picture of at most so many stages and microbatches; below each stage, what of its time is what."""
    layout = plan.layout
    small = dataclasses.replace(
        layout, pp=min(layout.pp, MOST_STAGES), microbatches=_few(layout.microbatches, min(layout.pp, MOST_STAGES))
    )
    works = schedule(small, 1.0, 2.0 if layout.recompute == "none" else 3.0)
    total = max(work.end for work in works)
    drawing = Drawing(960, 22 * small.pp + 50)
    scale = (960 - 130) / total
    for stage in range(small.pp):
        own = [work for work in works if work.stage == stage]
        busy = sum(work.end - work.start for work in own)
        y = 8 + 22 * stage
        drawing.rect(60, y, total * scale, 18, "#eee", f"stage {stage}: idle {1 - busy / total:.1%}")
        drawing.text(54, y + 13, f"stage {stage}", "end", 10)
        drawing.text(64 + total * scale, y + 13, f"idle {1 - busy / total:.0%}", size=10)
        for work in own:
            shade = 0.45 + 0.5 * work.chunk / max(1, small.vpp)
            fill = _mixed((164, 66, 0) if work.backward else (51, 101, 138), shade)
            name = f"{'backward' if work.backward else 'forward'} of microbatch {work.microbatch}, chunk {work.chunk}"
            drawing.rect(60 + work.start * scale, y, (work.end - work.start) * scale - 0.4, 18, fill, name)
    drawing.text(60, 22 * small.pp + 30, _caption(plan, small), size=11)
    return drawing.render()


def _few(count: int, pp: int) -> int:
    """Whole rounds of the interleaved schedule."""
    most = max(pp, MOST_MICROBATCHES // pp * pp)
    return min(count, most)


def _mixed(colour: tuple[int, int, int], share: float) -> str:
    return "#" + "".join(f"{round(255 - (255 - part) * share):02x}" for part in colour)


def _caption(plan: Plan, small: Candidate) -> str:
    cut = "" if small.microbatches == plan.layout.microbatches and small.pp == plan.layout.pp else (
        f"; shown are {small.pp} of {plan.layout.pp} stages and {small.microbatches} of {plan.layout.microbatches} "
        "microbatches"
    )  # fmt: skip
    sends = plan.spent_s["p2p"] / plan.step_s
    return f"blue: forward, brown: backward, grey: idle; sends between stages {sends:.1%} of the step{cut}"
