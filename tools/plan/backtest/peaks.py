"""Predicted memory of published runs, whose tables often leave out what is recomputed. No torch here."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tools.plan.backtest.rows import Row
from tools.plan.cases import Columns
from training.memory.cases import Column
from training.memory.layouts import Recompute
from training.memory.peak import SAFE_SHARE, memory


def peak_bytes(rows: Sequence[Row]) -> Column:
    """Bytes on the fullest rank. Where a table does not tell what is recomputed: the least with which the run fits."""
    found = _total(rows, "none")
    card = np.array([row.case.machine.memory_bytes for row in rows])
    for more in ("some", "full"):
        over = [number for number, row in enumerate(rows) if untold(row) and found[number] > SAFE_SHARE * card[number]]
        if over:
            found[over] = _total([rows[number] for number in over], more)
    return found


def untold(row: Row) -> bool:
    """Whether the table leaves out what is recomputed."""
    return not row.text.get("recompute")


def _total(rows: Sequence[Row], recomputed: str) -> Column:
    layouts = []
    for row in rows:
        if not untold(row) or recomputed == "none":
            layouts.append(row.case.layout)
            continue
        some: Recompute = "moe" if row.experts else "mlp"
        layouts.append(replace(row.case.layout, recompute="full" if recomputed == "full" else some))
    cases = [replace(row.case, layout=layout) for row, layout in zip(rows, layouts, strict=True)]
    return memory(Columns(cases), [row.shape for row in rows], layouts).total
