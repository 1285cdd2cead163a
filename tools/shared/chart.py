"""Charts as inline SVG: no library, no script, no network; a page that holds them brings ``STYLE``."""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

STYLE = """
:root { color-scheme: light dark; --ink: #222; --page: #fff; --soft: #f6f6f6; --axis: #999; --grid: #ddd;
  --pale: #c9c9c9; --paler: #e4e4e4 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --page: #16191d; --soft: #22272e; --axis: #888; --grid: #3a4048; --pale: #59616b;
    --paler: #343b44 }
}
.chart { overflow-x: auto } .chart svg { max-width: 100%; min-width: 720px; height: auto }
"""
"""For the page that holds charts: ink and paper in light and dark, and charts that scroll where a page is narrow."""


@dataclass(slots=True)
class Drawing:
    """Elements in the order in which they are painted; the origin is at the upper left."""

    width: float
    height: float
    elements: list[str] = field(default_factory=list)

    def rect(self, x: float, y: float, width: float, height: float, fill: str, title: str = "") -> None:
        tip = f"<title>{html.escape(title)}</title>" if title else ""
        self.elements.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.2f}" height="{height:.1f}" fill="{fill}">'
            f"{tip}</rect>"
        )

    def text(
        self, x: float, y: float, words: str, anchor: str = "start", size: int = 12, fill: str = "var(--ink)"
    ) -> None:
        self.elements.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{fill}">'
            f"{html.escape(words)}</text>"
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str = "var(--axis)", dash: str = "") -> None:
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.elements.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dashed}/>'
        )

    def path(self, points: Sequence[tuple[float, float]], colour: str, dash: str = "") -> None:
        where = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.elements.append(f'<polyline points="{where}" fill="none" stroke="{colour}" stroke-width="2"{dashed}/>')

    def dot(self, x: float, y: float, radius: float, fill: str, title: str = "") -> None:
        self.elements.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{fill}" fill-opacity="0.75">'
            f"<title>{html.escape(title)}</title></circle>"
        )

    def render(self) -> str:
        """The element to put into a page."""
        inner = "\n".join(self.elements)
        return (
            f'<div class="chart"><svg viewBox="0 0 {self.width:g} {self.height:g}" width="{self.width:g}" role="img" '
            f'font-family="sans-serif">\n{inner}\n</svg></div>'
        )


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
