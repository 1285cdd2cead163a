"""How large the numbers of an architecture may be: bounds far above any model's, so that what a file or a recipe claims
cannot make reading it endless."""

import math
from dataclasses import dataclass

MOST_SHOWN = 200
"""Characters of a value that a message shows."""


def shown(value: object) -> str:
    """A value as Python writes it, cut short."""
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


def is_number(value: object) -> bool:
    """Finite, and neither a truth value nor text; a whole one may have any size."""
    return type(value) is int or (isinstance(value, float) and math.isfinite(value))


@dataclass(slots=True, frozen=True)
class Span:
    """Numbers from ``least`` to ``most``, both included unless ``above`` or ``below``: then least or most is not."""

    least: float
    most: float
    whole: bool = False
    above: bool = False
    below: bool = False

    def __contains__(self, value: object) -> bool:
        if not is_number(value) or (self.whole and not isinstance(value, int)):
            return False
        enough = self.least < value if self.above else self.least <= value  # type: ignore[operator]
        return enough and (value < self.most if self.below else value <= self.most)  # type: ignore[operator]

    def __str__(self) -> str:
        if self.whole:
            return f"a whole number from {self.least:,} to {self.most:,}"
        most = f"{'below' if self.below else 'at most'} {self.most:g}"
        return f"a number {'above' if self.above else 'from'} {self.least:g}, {most}"

    def problem(self, key: str, value: object) -> str | None:
        """What is wrong with ``value``; None where it is one of these numbers."""
        return None if value in self else f"{key} = {shown(value)}: expected {self}"

    def short(self, value: float) -> str:
        """What ``value``, which is outside, must be: "1 or more", "in [0, 1)"."""
        if self.most <= 1:
            return f"in {'(' if self.above else '['}{self.least:g}, {self.most:g}{')' if self.below else ']'}"
        if value > self.least:
            return f"at most {self.most:,}"
        return f"above {self.least:g}" if self.above else f"{self.least:g} or more"


MOST_EXPERTS, MOST_WIDTH, MOST_TOKENS = 1 << 16, 1 << 24, (1 << 31) - 1
BLOCKS, LENGTH, TOKENS = (Span(1, most, whole=True) for most in (10_000, 1 << 27, MOST_TOKENS))
HEADS, EXPERTS, WIDTH = (Span(1, most, whole=True) for most in (1 << 16, MOST_EXPERTS, MOST_WIDTH))
SHARE, PART = Span(0, 1, below=True), Span(0, 1, above=True)
EPSILON = Span(0, 1, above=True)
FACTOR, FROM_ONE = Span(0, 1e6, above=True), Span(1, 1e12)
WEIGHT = Span(0, 1e3)
