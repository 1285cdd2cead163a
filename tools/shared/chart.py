"""Charts as inline SVG: no library, no script, no network; a page that holds them brings ``STYLE``."""

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from program.errors import printable

STYLE = """
:root { color-scheme: light dark; --ink: #222; --page: #fff; --soft: #f6f6f6; --axis: #999; --grid: #ddd;
  --pale: #c9c9c9; --paler: #e4e4e4; --c0: #33658a; --c1: #e4572e; --c2: #2f9c95; --c3: #7d5ba6; --c4: #b8860b;
  --c5: #c81d77; --c6: #4f772d; --c7: #5c6b73; --good: #2e7d4f; --bad: #c81d25; --warn: #a86200 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --page: #16191d; --soft: #22272e; --axis: #888; --grid: #3a4048; --pale: #59616b;
    --paler: #343b44; --c0: #6ba7d6; --c1: #ff8a65; --c2: #4fc3b8; --c3: #b39ddb; --c4: #e6b84f; --c5: #f06eb4;
    --c6: #9ccc65; --c7: #a9b6bd; --good: #6cc08b; --bad: #ff7070; --warn: #ffb74d }
}
.chart { overflow-x: auto } .chart svg { max-width: 100%; min-width: 720px; height: auto }
.chart.small svg { min-width: 0 }
@media screen and (max-width: 750px) {
  .chart:not(.small)::before { content: "scroll sideways \\2192"; position: sticky; left: 0; display: block;
    width: max-content; font-size: 11px; color: var(--axis) }
}
.narrow { display: none }
@media screen and (max-width: 600px) { .narrow { display: block } .wide { display: none } }
@media print {
  :root { color-scheme: light } .chart { overflow: visible; break-inside: avoid } .chart svg { min-width: 0 }
}
"""
"""For the page that holds charts: ink and paper in light and dark, and charts that scroll where a page is narrow,
or that are there twice, ``wide`` and ``narrow``."""
COLOURS = tuple(f"var(--c{number})" for number in range(8))
FAINT = ' stroke-opacity="0.35"'
LETTER = 6.6
"""Pixels of a letter of size 12, on average."""


def safe(words: str) -> str:
    """For a page: escaped, and what no page should get spelled out."""
    return html.escape(printable(words))


@dataclass(slots=True)
class Drawing:
    """Elements in the order in which they are painted; the origin is at the upper left."""

    width: float
    height: float
    label: str = ""
    """What it shows, for who does not see it."""
    small: bool = False
    """Readable at the width of a phone."""
    elements: list[str] = field(default_factory=list)

    def rect(self, x: float, y: float, width: float, height: float, fill: str, title: str = "") -> None:
        tip = f"<title>{safe(title)}</title>" if title else ""
        self.elements.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.2f}" height="{height:.1f}" fill="{fill}">'
            f"{tip}</rect>"
        )

    def text(
        self, x: float, y: float, words: str, anchor: str = "start", size: int = 12, fill: str = "var(--ink)"
    ) -> None:
        self.elements.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{fill}">'
            f"{safe(words)}</text>"
        )

    def line(
        self, x1: float, y1: float, x2: float, y2: float, colour: str = "var(--axis)", dash: str = "", title: str = ""
    ) -> None:
        dashed, tip = f' stroke-dasharray="{dash}"' if dash else "", f"<title>{safe(title)}</title>"
        self.elements.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dashed}'
            f"{f'>{tip}</line>' if title else '/>'}"
        )

    def path(self, points: Iterable[tuple[float, float]], colour: str, dash: str = "", more: str = "") -> None:
        """more: attributes of SVG."""
        where = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.elements.append(
            f'<polyline points="{where}" fill="none" stroke="{colour}" stroke-width="2"{dashed}{more}/>'
        )

    def area(self, points: Iterable[tuple[float, float]], fill: str, title: str) -> None:
        where = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.elements.append(f'<polygon points="{where}" fill="{fill}"><title>{safe(title)}</title></polygon>')

    def dot(self, x: float, y: float, radius: float, fill: str, title: str = "") -> None:
        self.elements.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{fill}" fill-opacity="0.75">'
            f"<title>{safe(title)}</title></circle>"
        )

    def render(self) -> str:
        """The element to put into a page."""
        inner = "\n".join(self.elements)
        label = f' aria-label="{safe(self.label)}"' if self.label else ""
        return (
            f'<div class="chart{" small" if self.small else ""}"><svg viewBox="0 0 {self.width:g} {self.height:g}" '
            f'width="{self.width:g}" role="img"{label} font-family="sans-serif">\n{inner}\n</svg></div>'
        )


def as_file(chart: str) -> str:
    """What ``Drawing.render`` gave, as an SVG file: it brings its paper and its colours for light and dark."""
    head, inner = chart[chart.index("<svg") : chart.rindex("</div>")].split(">", 1)
    paper = '<rect width="100%" height="100%" fill="var(--page)"/>'
    return f'{head} xmlns="http://www.w3.org/2000/svg"><style>{STYLE}</style>{paper}{inner}\n'


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers between two ends."""
    if high <= low:
        return [low]
    step = 10 ** math.floor(math.log10((high - low) / count))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= count)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def powers(low: float, high: float) -> list[float]:
    """Powers of two, or of ten where there are many, between two ends of a logarithmic axis."""
    base = 2 if high / low < 600 else 10
    first, last = math.ceil(math.log(low, base) - 1e-9), math.floor(math.log(high, base) + 1e-9)
    return [float(base**power) for power in range(first, last + 1)]


def short(value: float) -> str:
    """A number as an axis has it: 0.02, 1,500, 25k, 3.2M, 1e-05."""
    size = abs(value)
    if size >= 1e15:
        return f"{value:.3g}"
    for least, scale, letter in ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= least:
            return f"{value / scale:.4g}{letter}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def legend(
    drawing: Drawing, x: float, y: float, names: Sequence[str], width: float, colours: Mapping[str, str]
) -> None:
    """Coloured squares with their names, wrapped."""
    at = x
    for name in names:
        step = 26 + 7 * len(name)
        if at + step > x + width:
            at, y = x, y + 18
        drawing.rect(at, y - 10, 12, 12, colours[name])
        drawing.text(at + 16, y, name)
        at += step


def legend_rows(names: Sequence[str], width: float) -> int:
    """How many lines ``legend`` takes."""
    at, rows = 0.0, 1
    for name in names:
        step = 26 + 7 * len(name)
        at, rows = (step, rows + 1) if at and at + step > width else (at + step, rows)
    return rows
