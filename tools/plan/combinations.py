"""Flags that are not answered together, and values that no flag has: reported before anything is printed."""

import math
from collections.abc import Iterator
from dataclasses import MISSING, fields

from parallel.launch import MOST_RANKS
from tools.plan.flags import Flags
from tools.plan.rejections import constraint
from tools.plan.request import AXES

LARGEST = {"num_gpus": MOST_RANKS, "global_batch_size": (1 << 31) - 1, "seq_length": 1 << 27, "mbs": 1 << 24}
"""Of the axes of a layout, MOST_RANKS: what is beyond is a typing mistake, and would be counted through for hours."""
BACKTEST = ("output", "cross_validate", "refit")
ALONE: dict[str, tuple[str, ...]] = {
    "backtest": BACKTEST,
    "calibrate": (),
    "compare": ("model", "recipe", "cluster", "num_gpus", "global_batch_size", "seq_length", *AXES),
}
"""Flags that answer without a plan, and the only others that each of them reads."""
FIGURES = ("memory", "smallest", "sizing")
"""Answered without a layout; alone, or before the layouts where one of the next is asked for, too."""
LAYOUTS = ("top", "why", "write", "tokens", "report", "trace")


def problems(flags: Flags) -> list[str]:
    """All that is wrong. Raises UserError for a --explain that names no sizes."""
    if flags.explain is not None:
        constraint(flags.explain)
    return [*_dropped(_given(flags)), *_values(flags)]


def wants_layouts(flags: Flags) -> bool:
    """Whether layouts are to be planned and shown."""
    given = _given(flags)
    return not any(name in given for name in FIGURES) or any(name in given for name in LAYOUTS)


def _given(flags: Flags) -> list[str]:
    return [
        each.name
        for each in fields(flags)
        if each.default is MISSING or getattr(flags, each.name) != each.default
    ]  # fmt: skip


def _dropped(given: list[str]) -> Iterator[str]:
    alone = next((name for name in ALONE if name in given), None)
    if alone is None:
        if lost := [name for name in BACKTEST if name in given]:
            yield f"{_listed(lost)}: read with --backtest CSV only. Add it, or leave them out."
        return
    if lost := [name for name in given if name != alone and name not in ALONE[alone]]:
        reads = f"reads only {_listed(ALONE[alone])}" if ALONE[alone] else "reads no other flag"
        yield f"--{alone} {reads}, found {_listed(lost)}: ask the two in two commands."


def _listed(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(f"--{name}" for name in names)


def _values(flags: Flags) -> Iterator[str]:
    for name in {**LARGEST, **dict.fromkeys(AXES)}:
        most, size = LARGEST.get(name, MOST_RANKS), getattr(flags, name)
        if isinstance(size, int) and size > most:
            yield f"--{name} must be at most {most:,}, found {size if size < 10**30 else 'a larger number'}."
    if flags.top < 1:
        yield f"--top must be 1 or more, found {flags.top}."
    if flags.trace < 0:
        yield f"--trace must be 0 (no layout) or more, found {flags.trace}."
    if flags.tokens is not None and not 0 < flags.tokens < math.inf:
        yield f"--tokens must be above 0, and finite, found {flags.tokens:g}."
