"""Sizes and columns for people."""

import math
from collections.abc import Sequence

from program import printing


def size(count: float) -> str:
    """Bytes in the largest binary unit that leaves a number above 1: ``2.7 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.2f} TiB"


def count(number: int) -> str:
    """``8,030,261,248 (8.03 B)``; small ones without the short form."""
    for power, unit in ((12, "T"), (9, "B"), (6, "M")):
        if number >= 10**power:
            return f"{number:,} ({number / 10**power:.2f} {unit})"
    return f"{number:,}"


def number(value: float | None) -> str:
    """Four digits; ``-`` for what is not known."""
    return "-" if value is None else f"{value:.4g}"


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Rows of cells as lines; the columns ``right`` are flush right. Rows may be shorter than the longest."""
    width = max(map(len, rows), default=0)
    padded = [[*row, *[""] * (width - len(row))] for row in rows]
    return printing.columns(padded, left=[column for column in range(width) if column not in right], indent="")


def finite(value: float | None) -> float | None:
    """For JSON, which has no word for infinity or NaN: None."""
    return value if value is not None and math.isfinite(value) else None
