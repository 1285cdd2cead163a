"""Predicted memory of published runs, whose tables often leave out what is recomputed."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from models.costs.candidate import Recompute
from models.costs.cases import Column
from models.costs.predict import SAFE_SHARE, memory
from tests.planner.rows import PublishedRun
from tools.plan.cost.cases import PricedColumns


def peak_bytes(rows: Sequence[PublishedRun]) -> Column:
    """Bytes on the fullest rank. Where a table does not tell what is recomputed: the least with which the run fits.

    A run whose card cannot hold it even then has sharded its weights, which its table left out.
    """
    found = _total(rows, "none")
    card = np.array([row.case.machine.memory_bytes for row in rows])
    for more, share in (("some", SAFE_SHARE), ("full", SAFE_SHARE), ("sharded", 1.0)):
        over = [number for number, row in enumerate(rows) if untold(row) and found[number] > share * card[number]]
        if over:
            found[over] = _total([rows[number] for number in over], more)
    return found


def as_given(rows: Sequence[PublishedRun]) -> Column:
    """The same, with nothing recomputed but what the row, or its recipe, tells."""
    return _total(rows, "none")


def untold(row: PublishedRun) -> bool:
    """Whether the table leaves out what is recomputed."""
    return not row.text.get("recompute")


def _total(rows: Sequence[PublishedRun], recomputed: str) -> Column:
    layouts = []
    for row in rows:
        if not untold(row) or recomputed == "none":
            layouts.append(row.case.layout)
            continue
        some: Recompute = "moe" if row.experts else "mlp"
        layout = replace(row.case.layout, recompute=some if recomputed == "some" else "full")
        layouts.append(replace(layout, zero=3) if recomputed == "sharded" else layout)
    cases = [replace(row.case, layout=layout) for row, layout in zip(rows, layouts, strict=True)]
    return memory(PricedColumns(cases), [row.shape for row in rows], layouts).total
