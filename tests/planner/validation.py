"""What the planner says of runs that its constants have not seen."""

import hashlib
from collections.abc import Callable, Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from tests.planner.fit import fit
from tests.planner.rows import PublishedRun
from tools.plan.cost.cases import PricedColumns
from tools.plan.cost.constants import Constants
from tools.plan.cost.step import step_times

FOLDS = 5


def predicted_s(rows: Sequence[PublishedRun], constants: Constants) -> NDArray[np.float64]:
    """Seconds of a step of each row."""
    return step_times(PricedColumns([row.case for row in rows]), constants).total


def by_layout(rows: Sequence[PublishedRun], note: Callable[[str], None] = lambda text: None) -> NDArray[np.float64]:
    """Each row by constants fitted without any row of its layout (whatever day, container, or number of replicas)."""
    return _held_out(rows, [_fold(row.layout_key) for row in rows], note)


def by_cluster(rows: Sequence[PublishedRun], note: Callable[[str], None] = lambda text: None) -> NDArray[np.float64]:
    """Each row by constants fitted without any row of its cluster: a card on a fabric."""
    return _held_out(rows, [row.cluster.name for row in rows], note)


def _held_out(
    rows: Sequence[PublishedRun], groups: Sequence[Hashable], note: Callable[[str], None]
) -> NDArray[np.float64]:
    found = np.zeros(len(rows))
    for group in sorted(set(groups), key=str):
        chosen = [number for number, own in enumerate(groups) if own == group]
        note(f"fitting without {group}: {len(chosen)} rows held out")
        others = [row for row, own in zip(rows, groups, strict=True) if own != group]
        found[chosen] = predicted_s([rows[number] for number in chosen], fit(others))
    return found


def _fold(key: Hashable) -> int:
    """The same fold in every process, which hash() of text is not."""
    return int(hashlib.sha256(repr(key).encode()).hexdigest(), 16) % FOLDS
