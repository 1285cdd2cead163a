"""The pipeline of one step as Megatron's schedules run it, and what each stage spends it on."""

import dataclasses
from collections.abc import Sequence

from models.costs.candidate import Candidate
from tools.plan.report.charts import COLOURS
from tools.plan.report.schedule import Work, schedule
from tools.plan.report.stages import COMMUNICATION, StageTimeline, pass_seconds, stages
from tools.plan.search.pricing import SPENT, PricedLayout
from tools.plan.search.request import PlanRequest
from tools.shared.chart import Drawing, legend

MOST_STAGES = 16
MOST_MICROBATCHES = 24
WIDTH, LEFT, RIGHT, ROW = 960, 130, 230, 22
GAP = 0.1
"""Of a pass's width, that sets it off from the next."""
THINNEST = 0.05
"""Pixels; what is thinner is left out of a drawing that has thousands of passes."""


def pipeline(question: PlanRequest, plan: PricedLayout) -> str:
    """Two pictures with their words: the passes in time, and each stage's share of the whole step."""
    layout, found = plan.layout, stages(question, plan)
    few = dataclasses.replace(layout, microbatches=_few(layout))
    seconds, rows = pass_seconds(question, plan), _rows(layout.pp)
    works = schedule(few, seconds)
    return f"{_timeline(plan, few, works, seconds.exchange, found, rows)}\n{_shares(found, rows)}"


def words(plan: PricedLayout) -> str:
    """What is drawn, and what is not."""
    layout, few = plan.layout, _few(plan.layout)
    drawn = (
        f"One step of {layout}, drawn with all {few} microbatches."
        if few == layout.microbatches
        else f"One step of {layout}, drawn with {few} of its {layout.microbatches:,} microbatches: the others repeat "
        "the middle, in which the slowest stage is never idle."
    )
    if layout.pp > MOST_STAGES:
        drawn += f" Of {layout.pp} stages the first and the last {MOST_STAGES // 2} are drawn."
    return (
        f"{drawn} Percentages, and the bars below, are those of the whole step with all microbatches; the slowest "
        "stage's bubble is the table's. The bars alone tell of collectives within a pass (TP, CP, EP) "
        "and of other waiting."
    )


def _rows(pp: int) -> list[int | None]:
    """Stages to draw; None: a gap."""
    if pp <= MOST_STAGES:
        return list(range(pp))
    half = MOST_STAGES // 2
    return [*range(half), None, *range(pp - half, pp)]


def _few(layout: Candidate) -> int:
    """Whole rounds of the interleaved schedule, at least two; each microbatch has a pass in every chunk."""
    return min(layout.microbatches, max(2, MOST_MICROBATCHES // (layout.pp * layout.vpp)) * layout.pp)


def _timeline(
    plan: PricedLayout,
    few: Candidate,
    works: Sequence[Work],
    exchange: float,
    found: Sequence[StageTimeline],
    rows: Sequence[int | None],
) -> str:
    """exchange: seconds after each pass."""
    ended = max(work.end for work in works) + exchange + plan.spent_s["dp"]
    total = ended + plan.spent_s["optimizer"]
    drawing, scale = Drawing(WIDTH, ROW * len(rows) + 50), (WIDTH - LEFT - RIGHT) / total
    for row, stage in enumerate(rows):
        y = 8 + ROW * row
        if stage is None:
            drawing.text(LEFT - 6, y + 13, "...", "end", 11)
            continue
        own = [work for work in works if work.stage == stage]
        bubble = found[stage].share("bubble")
        drawing.rect(LEFT, y, ended * scale, 18, COLOURS["idle"], f"stage {stage}: bubble {bubble:.1%} of the step")
        _passes(drawing, own, few, y, scale, exchange)
        at = own[-1].end + exchange
        for name in ("dp", "optimizer"):
            seconds = plan.spent_s[name]
            drawing.rect(LEFT + at * scale, y, seconds * scale, 18, COLOURS[name], f"{name}: {seconds:.3g} s")
            at = max(ended, at + seconds)  # the optimizer needs the gradients' norm, of all stages
        _labels(drawing, y, stage, found[stage], f"bubble {bubble:.1%}")
    names = ("forward", "backward", "p2p", "dp", "optimizer", "idle")
    legend(drawing, LEFT, ROW * len(rows) + 32, names, WIDTH - LEFT, COLOURS)
    return drawing.render()


def _passes(drawing: Drawing, own: Sequence[Work], few: Candidate, y: float, scale: float, exchange: float) -> None:
    """Darker ones are of later chunks; after each, the exchange with the neighbours."""
    for work in own:
        name = "backward" if work.backward else "forward"
        fill = _mixed(COLOURS[name], 0.55 + 0.45 * (work.chunk + 1) / few.vpp)
        tip = f"{name} of microbatch {work.microbatch}, chunk {work.chunk}: {work.end - work.start:.3g} s"
        width = (work.end - work.start) * scale
        drawing.rect(LEFT + work.start * scale, y, width - min(0.4, GAP * width), 18, fill, tip)
        if exchange * scale > THINNEST:
            drawing.rect(LEFT + work.end * scale, y, exchange * scale, 18, COLOURS["p2p"], "sends")


def _labels(drawing: Drawing, y: float, number: int, stage: StageTimeline, words: str) -> None:
    drawing.text(LEFT - 6, y + 13, f"stage {number}: {stage.layers} layers", "end", 11)
    drawing.text(WIDTH - RIGHT + 6, y + 13, words, size=11)


def _shares(found: Sequence[StageTimeline], rows: Sequence[int | None]) -> str:
    """One bar a stage, of the whole step, in the colours of the bars above."""
    drawing, width = Drawing(WIDTH, ROW * len(rows) + 70), WIDTH - LEFT - RIGHT
    for row, number in enumerate(rows):
        y = 8 + ROW * row
        if number is None:
            drawing.text(LEFT - 6, y + 13, "...", "end", 11)
            continue
        stage, x = found[number], float(LEFT)
        for name in SPENT:
            share = stage.share(name)
            tip = f"stage {number}, {name}: {stage.spent_s[name]:.3g} s, {share:.1%} of the step"
            drawing.rect(x, y, share * width, 18, COLOURS[name], tip)
            x += share * width
        said = f"communication {stage.share(*COMMUNICATION):.1%}, bubble {stage.share('bubble'):.1%}"
        _labels(drawing, y, number, stage, said)
    legend(drawing, LEFT, ROW * len(rows) + 32, SPENT, width, COLOURS)
    return drawing.render()


def _mixed(colour: str, share: float) -> str:
    """With white."""
    parts = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - part) * share):02x}" for part in parts)
