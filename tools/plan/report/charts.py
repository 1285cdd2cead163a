"""The charts of a plan's page."""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

from tools.plan.search.pricing import HELD, SPENT, PricedLayout
from tools.shared.chart import Drawing, powers, ticks
from tools.shared.plot import Bar, Mark, Part, rows

COLOURS = {
    "products": "#33658a", "attention": "#2f9c95", "traffic": "#86bbd8", "recompute": "#7d5ba6", "offload": "#b8a1d1",
    "head": "#5c6b73", "tp": "#e4572e", "cp": "#f39237", "ep": "#c81d25", "p2p": "#f2c14e", "bubble": "var(--pale)",
    "dp": "#a44200", "optimizer": "#4f772d", "host": "#d4a5a5", "other": "#a3b18a", "weights": "#33658a",
    "gradients": "#86bbd8", "activations": "#f39237", "workspace": "var(--pale)", "forward": "#33658a",
    "backward": "#2f9c95", "idle": "var(--paler)",
}  # fmt: skip

WIDTH = 960
SLOWEST = 3
"""Times the fastest step, beyond which layouts are of no interest."""


def step_times(plans: Sequence[PricedLayout]) -> str:
    """One bar a layout, cut by what takes the time; the whisker is the interval."""
    intervals = [(plan.step_s * plan.interval.low, plan.step_s * plan.interval.high) for plan in plans]
    bars = [
        Bar(str(plan.layout), _parts(plan.spent_s, SPENT, "s"), whisker=interval)
        for plan, interval in zip(plans, intervals, strict=True)
    ]
    names, high = {name: COLOURS[name] for name in SPENT}, max(end for _, end in intervals)
    return rows("seconds of a step", bars, high=high, unit="s", names=names)


def memory(plans: Sequence[PricedLayout]) -> str:
    """One bar a layout, cut by category; lines at the card's size and at 80 % of it."""
    bars = [Bar(str(plan.layout), _parts(plan.held_bytes, HELD, "GiB", 2**30)) for plan in plans]
    card, names = plans[0].memory_bytes / 2**30, {name: COLOURS[name] for name in HELD}
    lines = [Mark(x=card * share, title=f"{share:.0%} of the card", colour="#c81d25") for share in (0.8, 1.0)]
    return rows("memory of the fullest rank", bars, high=card * 1.02, unit="GiB", names=names, lines=lines)


def _parts(sizes: Mapping[str, float], names: Sequence[str], unit: str, scale: float = 1.0) -> list[Part]:
    ends = list(accumulate(sizes[name] / scale for name in names))
    return [
        Part(begin, end, COLOURS[name], f"{name}: {end - begin:.3g} {unit}")
        for name, begin, end in zip(names, [0.0, *ends], ends, strict=False)
    ]


def pareto(plans: Sequence[PricedLayout], chosen: PricedLayout) -> str:
    """Time against memory of all plans that fit, and the chosen one; the line joins what nothing beats in both."""
    drawing = Drawing(WIDTH, 420)
    left, right, top, bottom = 70, WIDTH - 30, 20, 370
    high = max(plans[0].memory_bytes, chosen.total_bytes) / 2**30 * 1.05
    least, most = _times_worth_showing(plans, chosen)

    def x(seconds: float) -> float:
        return left + (right - left) * math.log(seconds / least) / math.log(most / least)

    def y(size: float) -> float:
        return bottom - (bottom - top) * size / 2**30 / high

    for tick in ticks(0, high):
        drawing.line(left, y(tick * 2**30), right, y(tick * 2**30), "var(--grid)")
        drawing.text(left - 6, y(tick * 2**30) + 4, f"{tick:g}", "end")
    for tick in ticks(least, most, 8):
        drawing.line(x(tick), bottom, x(tick), bottom + 4)
        drawing.text(x(tick), bottom + 18, f"{tick:g} s", "middle")
    shown = [plan for plan in plans if plan.step_s <= most]
    for plan in shown:
        colour = "#86bbd8" if plan.layout.zero > 1 else "#4f772d"
        drawing.dot(x(plan.step_s), y(plan.total_bytes), 3, colour, str(plan.layout))
    drawing.path([(x(plan.step_s), y(plan.total_bytes)) for plan in frontier(shown)], "#33658a")
    drawing.dot(x(chosen.step_s), y(chosen.total_bytes), 7, "#e4572e", f"chosen: {chosen.layout}")
    limit = y(0.8 * plans[0].memory_bytes)
    drawing.line(left, limit, right, limit, "#c81d25", "4 3")
    drawing.text(right, limit - 5, "80 % of the card", "end", 11, "#c81d25")
    drawing.text(left, top - 6, "GiB on the fullest rank", size=11)
    drawing.text(right, bottom + 36, "seconds of a step (logarithmic)", "end", 11)
    return drawing.render()


def _times_worth_showing(plans: Sequence[PricedLayout], chosen: PricedLayout) -> tuple[float, float]:
    """The ends of the axis: of what there is, up to three times the fastest, and a little room at both."""
    times = [plan.step_s for plan in (*plans, chosen)]
    least = min(times)
    most = max(chosen.step_s, *(seconds for seconds in times if seconds <= SLOWEST * least))
    room = max(1.001, (most / least) ** 0.03)
    return least / room, most * room


def frontier(plans: Sequence[PricedLayout]) -> list[PricedLayout]:
    """Those that no other beats in both time and memory, the fastest first."""
    found: list[PricedLayout] = []
    for plan in sorted(plans, key=lambda plan: (plan.step_s, plan.total_bytes)):
        if not found or plan.total_bytes < found[-1].total_bytes:
            found.append(plan)
    return found


def scaling(points: Sequence[tuple[int, PricedLayout]]) -> str:
    """Tokens per second of the best layout over GPU counts, against a straight line from the smallest."""
    drawing = Drawing(WIDTH, 360)
    left, right, top, bottom = 90, WIDTH - 150, 20, 310
    floor = bottom - 30  # of the smallest rate: between it and the axis is room for its share
    rates = [count * plan.tokens_per_s_per_gpu for count, plan in points]
    ideal = [rates[0] * count / points[0][0] for count, _ in points]
    low, high = min(rates), max(ideal)

    def x(count: float) -> float:
        spread = math.log(points[-1][0] / points[0][0]) or 1
        return left + (right - left) * math.log(count / points[0][0]) / spread

    def y(rate: float) -> float:
        return floor - (floor - top) * math.log(rate / low) / (math.log(high / low) or 1)

    for tick in powers(low, high):
        drawing.line(left, y(tick), right, y(tick), "var(--grid)")
        drawing.text(left - 6, y(tick) + 4, f"{tick:,.0f}", "end")
    drawing.path([(x(count), y(rate)) for (count, _), rate in zip(points, ideal, strict=True)], "var(--axis)", "4 3")
    drawing.path([(x(count), y(rate)) for (count, _), rate in zip(points, rates, strict=True)], "#33658a")
    for (count, plan), rate, straight in zip(points, rates, ideal, strict=True):
        drawing.dot(x(count), y(rate), 5, "#33658a", f"{count} GPUs: {plan.layout}, {plan.step_s:.3g} s")
        drawing.text(x(count), bottom + 18, f"{count:,}", "middle")
        drawing.text(x(count) + 8, y(rate) + 16, f"{rate / straight:.0%}", size=11)
    drawing.text(left, top - 6, "tokens per second", size=11)
    drawing.text(right, bottom + 36, "GPUs (same batch; dashed: a straight line from the first)", "end", 11)
    return drawing.render()


def published(points: Sequence[tuple[float, float, bool, str]]) -> str:
    """Predicted over measured seconds of published runs: (measured, predicted, experts, name)."""
    drawing = Drawing(WIDTH, 420)
    left, right, top, bottom = 70, WIDTH - 30, 20, 370
    low = min(min(measured, predicted) for measured, predicted, _, _ in points)
    high = max(max(measured, predicted) for measured, predicted, _, _ in points)

    def place(seconds: float, start: float, end: float) -> float:
        return start + (end - start) * math.log(seconds / low) / math.log(high / low)

    for factor, dash in ((1, ""), (0.8, "4 3"), (1.25, "4 3")):
        ends = [(seconds, seconds * factor) for seconds in (max(low, low / factor), min(high, high / factor))]
        drawing.path([(place(m, left, right), place(p, bottom, top)) for m, p in ends], "var(--axis)", dash)
    for tick in powers(low, high):
        drawing.text(place(tick, left, right), bottom + 18, f"{tick:g} s", "middle")
        drawing.text(left - 6, place(tick, bottom, top) + 4, f"{tick:g} s", "end")
    for measured, predicted, experts, name in points:
        drawing.dot(
            place(measured, left, right), place(predicted, bottom, top), 3, "#c81d25" if experts else "#33658a",
            f"{name}: measured {measured:.3g} s, predicted {predicted:.3g} s",
        )  # fmt: skip
    drawing.text(left, top - 6, "predicted; blue: dense, red: experts; dashed: 25 % off", size=11)
    drawing.text(right, bottom + 36, "measured", "end", 11)
    return drawing.render()
