"""Curves, bars, timelines, areas and heat maps, drawn with ``tools.shared.chart``."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from tools.shared.chart import FAINT, LETTER, Drawing, legend, legend_rows, short, ticks


class Point(NamedTuple):
    """y: NaN where there is none."""

    x: float
    y: float


@dataclass(kw_only=True, slots=True, frozen=True)
class Curve:
    """A curve."""

    name: str
    points: Sequence[Point]
    colour: str
    dash: str = ""
    dots: bool = False
    """A dot at each point, with a tip: for few of them."""
    faint: bool = False


@dataclass(kw_only=True, slots=True, frozen=True)
class Mark:
    """A line across a chart at ``x``."""

    x: float
    title: str
    colour: str


class Part(NamedTuple):
    """A piece of a bar, or of a row of a timeline: from ``begin`` to ``end`` on its axis."""

    begin: float
    end: float
    colour: str
    title: str


class Bar(NamedTuple):
    """A row of pieces: a bar cut into parts, or a row of a timeline."""

    name: str
    parts: Sequence[Part]
    end: str = ""
    """Words behind it."""
    whisker: tuple[float, float] | None = None
    """The interval around its end."""


@dataclass(kw_only=True, slots=True)
class Plot:
    """Two axes. Values beyond the upper end are drawn at it, with a triangle that says what they are."""

    label: str
    unit: str
    low: float
    high: float
    left_x: float
    right_x: float
    width: float = 960
    height: float = 320
    log: bool = False
    small: bool = False
    x_name: str = "iteration"

    def draw(
        self,
        series: Sequence[Curve],
        marks: Sequence[Mark] = (),
        second: Sequence[tuple[float, str]] = (),
        keys: Mapping[str, str] | None = None,
    ) -> str:
        """second: x and text of a second scale above. keys: of the legend, with colours; None: the series."""
        keys = {one.name: one.colour for one in series} if keys is None else keys
        names = list(keys)
        top, bottom = 20 + 16 * bool(second), self.height - 38
        extra = 18 * legend_rows(names, self.width - 60) if names else 0
        drawing = Drawing(self.width, self.height + extra, self.label, self.small)
        steps = self._y_ticks()
        left, right = 14 + LETTER * max(len(short(step)) for step in steps), self.width - 16

        def at_x(x: float) -> float:
            return left + (right - left) * (x - self.left_x) / ((self.right_x - self.left_x) or 1.0)

        def at_y(y: float) -> float:
            share = (self._scaled(y) - self._scaled(self.low)) / (
                (self._scaled(self.high) - self._scaled(self.low)) or 1
            )
            return bottom - (bottom - top) * max(-0.02, min(1.0, share))

        for step in steps:
            drawing.line(left, at_y(step), right, at_y(step), "var(--grid)")
            drawing.text(left - 6, at_y(step) + 4, short(step), "end")
        for step in ticks(self.left_x, self.right_x, 4 if self.small else 8):
            drawing.line(at_x(step), bottom, at_x(step), bottom + 4)
            drawing.text(at_x(step), bottom + 17, short(step), "middle")
        for x, text in second:
            anchor = "end" if at_x(x) > right - 30 else "start" if at_x(x) < left + 30 else "middle"
            drawing.text(at_x(x), 14, text, anchor, 11, "var(--axis)")
        for mark in marks:
            x = max(left, min(right, at_x(mark.x)))
            drawing.line(x, top, x, bottom, mark.colour, "3 3", mark.title)
            drawing.dot(x, top, 4, mark.colour, mark.title)
        for one in series:
            self._curve(drawing, one, at_x, at_y)
        drawing.line(left, bottom, right, bottom)
        drawing.text(left, self.height - 6, self.unit, size=11, fill="var(--axis)")
        drawing.text(right, self.height - 6, self.x_name, "end", 11, "var(--axis)")
        if names:
            legend(drawing, 30, self.height + 12, names, self.width - 60, keys)
        return drawing.render()

    def _curve(self, drawing: Drawing, one: Curve, at_x, at_y) -> None:  # type: ignore[no-untyped-def]
        for run in _runs(one.points):
            drawing.path(((at_x(point.x), at_y(point.y)) for point in run), one.colour, one.dash, FAINT * one.faint)
            if one.dots or len(run) == 1:
                for point in run:
                    tip = f"{one.name}, {self.x_name} {point.x:g}: {point.y:.6g} {self.unit}"
                    drawing.dot(at_x(point.x), at_y(point.y), 3, one.colour, tip)
            beyond = [point for point in run if point.y > self.high]
            for point in beyond[:: max(1, len(beyond) // 20)]:
                x, y = at_x(point.x), at_y(self.high)
                tip = f"{one.name}, {self.x_name} {point.x:g}: {point.y:.4g}, beyond this scale"
                drawing.area([(x - 4, y + 6), (x + 4, y + 6), (x, y - 2)], "var(--bad)", tip)

    def _y_ticks(self) -> list[float]:
        if not self.log:
            return ticks(self.low, self.high, 4 if self.small else 6)
        tens = [10.0**power for power in range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)]
        return tens if len(tens) > 1 else ticks(self.low, self.high, 4)

    def _scaled(self, value: float) -> float:
        return math.log10(max(value, self.low)) if self.log else value


def _runs(points: Iterable[Point]) -> Iterator[list[Point]]:
    """Stretches without a gap."""
    run: list[Point] = []
    for point in points:
        if math.isfinite(point.y):
            run.append(point)
        elif run:
            yield run
            run = []
    if run:
        yield run


def rows(
    label: str,
    bars: Sequence[Bar],
    *,
    low: float = 0.0,
    high: float,
    unit: str,
    names: Mapping[str, str],
    lines: Sequence[Mark] = (),
    thick: float = 20,
) -> str:
    """Horizontal rows of pieces on one axis: bars cut into parts, or a timeline. names: of the legend, with colours.

    lines: across all rows.
    """
    width, step, bottom = 960, thick + 8, (thick + 8) * len(bars) + 8
    left = 14 + LETTER * max((len(bar.name) for bar in bars), default=0)
    right = width - 20 - LETTER * max((len(bar.end) for bar in bars), default=0)
    drawing = Drawing(width, bottom + 30 + 18 * legend_rows(list(names), width - left), label)
    scale = (right - left) / ((high - low) or 1.0)
    for tick in ticks(low, high, 6):
        drawing.line(left + (tick - low) * scale, 4, left + (tick - low) * scale, bottom, "var(--grid)")
        drawing.text(left + (tick - low) * scale, bottom + 15, f"{short(tick)} {unit}", "middle", 11)
    for number, bar in enumerate(bars):
        y = 8 + step * number
        drawing.text(left - 8, y + thick / 2 + 4, bar.name, "end", 11)
        for part in bar.parts:
            drawing.rect(
                left + (part.begin - low) * scale, y, (part.end - part.begin) * scale, thick, part.colour, part.title
            )
        if bar.whisker is not None:
            first, last = (left + (x - low) * scale for x in bar.whisker)
            drawing.line(first, y + thick / 2, last, y + thick / 2, "var(--ink)")
            for x in (first, last):
                drawing.line(x, y + 5, x, y + thick - 5, "var(--ink)")
        if bar.end:
            drawing.text(right + 8, y + thick / 2 + 4, bar.end, size=11)
    for mark in lines:
        drawing.line(
            left + (mark.x - low) * scale, 2, left + (mark.x - low) * scale, bottom, mark.colour, "4 3", mark.title
        )
    legend(drawing, left, bottom + 38, list(names), width - left, names)
    return drawing.render()


def stacked(label: str, layers: Sequence[Curve], x_name: str = "iteration", width: float = 960) -> str:
    """Shares of a whole over x, one above the other; all layers have the same x."""
    drawing, left, right, top, bottom = Drawing(width, 270, label), 50.0, width - 16, 10.0, 200.0
    columns = [
        Point(first[0].x, sum(point.y for point in first))
        for first in zip(*(one.points for one in layers), strict=True)
    ]
    first_x, last_x = columns[0].x, columns[-1].x

    def at_x(x: float) -> float:
        return left + (right - left) * (x - first_x) / ((last_x - first_x) or 1.0)

    below = [0.0] * len(columns)
    for one in layers:
        above = [
            low + point.y / (column.y or 1.0) for low, point, column in zip(below, one.points, columns, strict=True)
        ]
        edge = [(at_x(column.x), bottom - (bottom - top) * share) for column, share in zip(columns, above, strict=True)]
        base = [(at_x(column.x), bottom - (bottom - top) * share) for column, share in zip(columns, below, strict=True)]
        drawing.area([*edge, *reversed(base)], one.colour, f"{one.name}: {above[-1] - below[-1]:.1%} at the end")
        below = above
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        drawing.text(left - 6, bottom - (bottom - top) * share + 4, f"{share:.0%}", "end", 11)
    for tick in ticks(first_x, last_x, 8):
        drawing.text(at_x(tick), bottom + 17, short(tick), "middle", 11)
    drawing.text(right, bottom + 34, x_name, "end", 11, "var(--axis)")
    legend(
        drawing, left, bottom + 52, [one.name for one in layers], width - left, {one.name: one.colour for one in layers}
    )
    return drawing.render()


def heat(
    label: str,
    names: Sequence[str],
    cells: Sequence[Sequence[float]],
    tips: Sequence[str],
    x_name: str,
    width: float = 960,
) -> str:
    """Rows of cells, each a strength from 0 (paper) to 1, and a tip for each row. A path for each of ten strengths."""
    thick = 18 if len(names) <= 24 else 9
    left, bottom = 14 + LETTER * max((len(name) for name in names), default=0), thick * len(names) + 4
    drawing, squares = Drawing(width, bottom + 26, label), [""] * 11
    for number, (name, row, tip) in enumerate(zip(names, cells, tips, strict=True)):
        y, wide = 4 + thick * number, (width - left - 16) / max(1, len(row))
        if thick > 10 or number % 2 == 0:
            drawing.text(left - 6, y + thick / 2 + 4, name, "end", 11)
        place = 0
        for level, alike in groupby(round(10 * max(0.0, min(1.0, strength))) for strength in row):
            count = len(list(alike))
            squares[level] += f"M{left + place * wide:.1f} {y}h{count * wide:.1f}v{thick - 1}h{-count * wide:.1f}z"
            place += count
        drawing.rect(left, y, width - left - 16, thick - 1, "transparent", tip)
    paths = [
        f'<path d="{square}" fill="var(--c1)" fill-opacity="{max(0.04, level / 10):g}"/>'
        for level, square in enumerate(squares)
        if square
    ]
    drawing.elements[:0] = paths  # below the tips
    drawing.text(width - 16, bottom + 18, x_name, "end", 11, "var(--axis)")
    return drawing.render()
