"""Where the time goes: of the whole run over all its starts, and of one step."""

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence

from tools.report.markup import counted, figure, lasting
from tools.report.run_data import RunData
from tools.report.traces import passes_s
from tools.shared.plot import Bar, Part, rows
from training.run_dir.goodput import SPENT, MeasuredGoodput, TimeSpan

COLOURS = {
    "productive": "var(--c0)", "checkpoint": "var(--c4)", "evaluation": "var(--c2)", "restart": "var(--c7)",
    "lost": "var(--bad)", "idle": "var(--paler)",
}  # fmt: skip
MOST_STARTS = 40
"""Rows of the timeline; of more starts, the newest."""
LINES = 200
"""Of metrics, that a step's budget is a mean of."""
BUDGET = {
    "compute": "var(--c0)", "exposed communication": "var(--c1)", "pipeline bubble": "var(--c7)",
    "data wait": "var(--bad)", "checkpoint": "var(--c4)", "evaluation": "var(--c2)",
}  # fmt: skip


def goodput_section(runs: Sequence[RunData]) -> str:
    """A bar of shares per run, and of a single run its starts in time."""
    known = [run for run in runs if run.goodput.wall_s > 0]
    if not known:
        return ""
    bars = [
        Bar(
            run.name if len(runs) > 1 else "all starts",
            list(_shares(run.goodput)),
            f"{run.goodput.share:.1%} productive",
        )
        for run in known
    ]
    body = figure(
        "Shares of the wall time",
        rows("shares of the wall time", bars, high=100.0, unit="%", names=COLOURS),
        ", ".join(f"{spent} {lasting(runs[0].goodput.seconds(spent))}" for spent in SPENT) if len(runs) == 1 else "",
    )
    if len(runs) == 1:
        body += _starts(runs[0])
    return body


def _shares(goodput: MeasuredGoodput) -> Iterator[Part]:
    at = 0.0
    for spent in SPENT:
        share = 100 * goodput.seconds(spent) / goodput.wall_s
        yield Part(at, at + share, COLOURS[spent], f"{spent}: {share:.1f} %, {lasting(goodput.seconds(spent))}")
        at += share


def _starts(run: RunData) -> str:
    spans, first_s = run.goodput.spans, run.goodput.spans[0].begin_s
    unit, size = next(
        (unit for unit in (("s", 1.0), ("min", 60.0), ("h", 3600.0)) if run.goodput.wall_s < 200 * unit[1]),
        ("days", 86400.0),
    )
    shown = sorted({span.start for span in spans})[-MOST_STARTS:]
    bars = []
    for number in shown:
        parts = [
            Part(
                (span.begin_s - first_s) / size, (span.end_s - first_s) / size, COLOURS[span.spent],
                f"start {number + 1}: {span.spent}, {lasting(span.end_s - span.begin_s)}",
            )
            for span in _joined([span for span in spans if span.start == number])
        ]  # fmt: skip
        bars.append(Bar(f"start {number + 1}", parts))
    thick = 18 if len(bars) <= 12 else 8
    begin = min(part.begin for bar in bars for part in bar.parts)
    drawing = rows(
        "starts over time", bars, low=begin, high=run.goodput.wall_s / size, unit=unit, names=COLOURS, thick=thick
    )
    return figure("Starts over time", drawing, counted(run.goodput.restarts + 1, "start"))


def _joined(spans: Sequence[TimeSpan]) -> list[TimeSpan]:
    """What is thinner than a thousandth of the whole belongs to its neighbour: a run saves thousands of times."""
    least = (spans[-1].end_s - spans[0].begin_s) / 1000
    found: list[TimeSpan] = []
    for span in spans:
        if found and (span.end_s - span.begin_s < least or span.spent == found[-1].spent):
            found[-1] = dataclasses.replace(found[-1], end_s=span.end_s)
        else:
            found.append(span)
    return found


def budget(run: RunData) -> dict[str, float]:
    """Seconds of one iteration by what takes them, of the newest LINES lines; empty where it is not known."""
    metrics = run.metrics
    per_iteration = metrics.column("iteration_s")
    if per_iteration is None or len(per_iteration.values) < 2:
        return {}
    first = max(0, len(per_iteration.values) - LINES)
    begin, end = per_iteration.iterations[first], per_iteration.iterations[-1]
    count = max(1, end - begin)
    step_s = statistics.fmean(value for value in per_iteration.values[first:] if math.isfinite(value))
    found = {
        "exposed communication": _share(run, "exposed_communication", step_s),
        "pipeline bubble": _share(run, "pipeline_bubble", min(step_s, passes_s(run) or step_s)),
        "data wait": _sum(run, "data_wait_s", begin, end) / count,
    }
    found = {"compute": max(0.0, step_s - sum(found.values())), **found}
    found["checkpoint"] = _sum(run, "checkpoint_stall_s", begin, end) / count
    evaluated = [
        event.number("seconds")
        for event in run.events
        if event.event == "evaluation" and begin < (event.iteration or 0) <= end
    ]
    found["evaluation"] = sum(evaluated) / count
    return found


def _share(run: RunData, name: str, whole_s: float) -> float:
    """Seconds of a step, of a metric that is a share of ``whole_s``."""
    value = run.metrics.last(name)
    return 0.0 if value is None or not 0 <= value <= 1 else value * whole_s


def _sum(run: RunData, name: str, begin: int, end: int) -> float:
    column = run.metrics.column(name)
    if column is None:
        return 0.0
    pairs = zip(column.iterations, column.values, strict=True)
    return sum(value for iteration, value in pairs if begin < iteration <= end and math.isfinite(value))


def budget_section(runs: Sequence[RunData]) -> str:
    """A bar per run."""
    found = [(run.name if len(runs) > 1 else "a step", budget(run)) for run in runs]
    found = [(name, parts) for name, parts in found if sum(parts.values()) > 0]
    if not found:
        return ""
    milli = 1000 if max(sum(parts.values()) for _, parts in found) < 2 else 1
    unit = "ms" if milli == 1000 else "s"
    bars = []
    for name, parts in found:
        at, pieces = 0.0, []
        for what, seconds in parts.items():
            share = seconds / sum(parts.values())
            pieces.append(Part(at, at + seconds * milli, BUDGET[what], f"{what}: {lasting(seconds)}, {share:.1%}"))
            at += seconds * milli
        bars.append(Bar(name, pieces))
    there = {what: colour for what, colour in BUDGET.items() if any(parts.get(what) for _, parts in found)}
    high = max(bar.parts[-1].end for bar in bars)
    drawing = rows("time of a step", bars, high=high, unit=unit, names=there)
    first, whole = found[0][1], sum(found[0][1].values())
    said = ", ".join(f"{what} {seconds / whole:.1%}" for what, seconds in first.items() if seconds)
    return figure("Time budget of a step", drawing, said if len(runs) == 1 else "")
