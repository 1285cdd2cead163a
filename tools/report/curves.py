"""Charts of metrics over iterations, of one run or of several in one picture."""

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tools.report.markup import figure, figure_text
from tools.report.metrics_table import Column
from tools.report.run_data import RunData
from tools.report.thinning import averaged, thinned
from tools.shared.chart import COLOURS, short, ticks
from tools.shared.plot import Curve, Mark, Plot, Point
from training.metrics.registry import find

WARM_UP = 0.05
"""Share of the iterations at the beginning whose values do not widen an axis far."""
SPIKE = 4.0
"""Times the height of all but the highest values, beyond which a chart does not reach; spikes stand at its edge."""
CUT_FROM = 20
"""Values from which on an axis may leave out the highest: of fewer, none is known to be a spike."""
SMOOTHED_FROM = 150
"""Points from which on a noisy curve has a smoothed one over it."""
UPPER = re.compile(r"\b(gpu|mfu|hfu|tflops|sm|mtp|rms|gib)\b")
CAPTIONS = {"iteration_s": "time of an iteration", "gpu_energy_j": "GPU energy of an iteration"}
SMALL = {"width": 420.0, "height": 200.0, "small": True}


Axis = Literal["fit", "zero", "log"]
"""Of values: around them, or from 0 on, or of their logarithms."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Overlay:
    """What lies over the curves of a chart."""

    marks: Sequence[Mark] = ()
    curves: Sequence[Curve] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    """Of both, for the legend, with colours."""


def limits(values: Sequence[float], axis: Axis = "fit") -> tuple[float, float] | None:
    """The ends of an axis for these values; None where none is a number that fits on it."""
    zero, log = axis == "zero", axis == "log"
    finite = [value for value in values if abs(value) < 1e300 and (not log or value > 0)]
    if not finite:
        return None
    later = sorted(finite[int(WARM_UP * len(finite)) :] if len(finite) >= CUT_FROM else finite)
    low, high = min(later[0], finite[-1]), max(finite)
    usual = later[int(0.99 * (len(later) - 1))] if len(finite) >= CUT_FROM else high
    low = min(0.0, low) if zero else low
    if log:
        return low / 1.2, max(high, low) * 1.2
    if high > low + SPIKE * (usual - low) > low:
        high = low + SPIKE * (usual - low)
    room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return (low if zero and low == 0.0 else low - room), high + room


def smoothed(column: Column) -> list[Point]:
    """The median of a fiftieth of the curve that lies around each point: it does not lag behind, nor jump."""
    means = averaged(column.iterations, column.values, 600)
    half = max(1, len(means) // 100)
    found = []
    for place, (x, _) in enumerate(means):
        reach = min(half, place, len(means) - 1 - place)
        around = means[place - reach : place + reach + 1]
        found.append(Point(x, statistics.median(y for _, y in around)))
    return found


def chart(
    runs: Sequence[RunData],
    names: Sequence[str],
    caption: str,
    *,
    axis: Axis = "fit",
    small: bool = True,
    smooth: bool = False,
    over: Overlay = Overlay(),
    text: Callable[[float], str] = figure_text,
) -> str:
    """The curves of these keys in all runs, in one picture; nothing where there are none. text: of the newest value."""
    series: list[Curve] = []
    newest: list[str] = []
    for run in runs:
        for name in names:
            column = run.metrics.column(name)
            if column is None:
                continue
            label = " ".join(filter(None, [run.name if len(runs) > 1 else "", name if len(names) > 1 else ""]))
            pixels = (240 if small else 600) // max(1, len(runs) // 3)
            series += _series(label or caption, column, COLOURS[len(newest) % len(COLOURS)], smooth, pixels)
            newest.append(f"{f'{label} ' if label else ''}{text(column.values[-1])}")
    found = limits([point.y for one in series for point in one.points], axis)
    if found is None:
        return ""
    keys = {one.name: one.colour for one in series if not one.faint} if len(newest) > 1 else {}
    everything = [*over.curves, *series]
    plot = Plot(
        label=f"{caption} over iterations",
        unit=_unit(names[0]).strip(),
        low=found[0],
        high=found[1],
        left_x=min(one.points[0].x for one in everything if one.points),
        right_x=max(one.points[-1].x for one in everything if one.points),
        log=axis == "log",
        **(SMALL if small else {}),  # type: ignore[arg-type]
    )
    second = [] if small else _tokens(runs, plot.left_x, plot.right_x)
    drawing = plot.draw(everything, over.marks, second, keys | dict(over.names))
    return figure(caption, drawing, ", ".join(newest[:6]) + _unit(names[0]))


def _unit(name: str) -> str:
    metric = find(name)
    return f" {metric.unit}" if metric and metric.unit else ""


def _series(name: str, column: Column, colour: str, smooth: bool, pixels: int) -> list[Curve]:
    points = thinned(column.iterations, column.values, pixels)
    if smooth and len(column.values) >= SMOOTHED_FROM:
        return [
            Curve(name=name, points=points, colour=colour, faint=True),
            Curve(name=name, points=smoothed(column), colour=colour),
        ]
    return [Curve(name=name, points=points, colour=colour, dots=len(points) <= 40)]


def _tokens(runs: Sequence[RunData], left: float, right: float) -> list[tuple[float, str]]:
    """The second scale: tokens consumed at the iterations of the first one, of a single run."""
    column = runs[0].metrics.column("consumed_tokens") if len(runs) == 1 else None
    if column is None:
        return []
    tokens = dict(zip(column.iterations, column.values, strict=True))
    found: list[tuple[float, str]] = []
    for tick in ticks(left, right, 8):
        nearest = min((iteration for iteration in tokens if iteration >= tick), default=None)
        if nearest is not None and nearest - tick <= (right - left) / 40:
            found.append((float(nearest), short(tokens[nearest]) + " tokens" * (not found)))
    return found


def small_charts(runs: Sequence[RunData], names: Sequence[str]) -> list[str]:
    """One for each key that a run has."""
    return [chart(runs, [name], words_of(name), axis="zero") for name in names]


def words_of(name: str) -> str:
    """A key as a caption, without the unit that stands behind the number: tokens/s/GPU."""
    if name in CAPTIONS:
        return CAPTIONS[name]
    name = re.sub(r"(?<!per)_(s|w|c|j|mhz|gib)$", "", name) if _unit(name) else name
    return UPPER.sub(lambda found: found[0].upper().replace("GIB", "GiB"), name.replace("_per_", "/").replace("_", " "))


def all_names(runs: Sequence[RunData]) -> list[str]:
    """Keys of any of the runs."""
    return list(dict.fromkeys(name for run in runs for name in run.metrics.names()))
