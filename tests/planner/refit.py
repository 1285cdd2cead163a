"""Fits the constants and writes ``cost/fitted.toml``: constants, intervals, and how well unseen runs were met; and the
points of the page."""

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from tests.planner import validation
from tests.planner.fit import fit
from tests.planner.metrics import errors, order
from tests.planner.rows import PublishedRun
from tools.plan.cost import constants
from tools.plan.cost.constants import FITTED
from tools.plan.report.accuracy import POINTS, PublishedPoint

PLACES = 5
"""Significant digits that are kept: more would pretend."""


def refit(rows: Sequence[PublishedRun], note: Callable[[str], None]) -> None:
    """Takes minutes: one fit of everything, one for each fold and each cluster that is left out."""
    stated = [row for row in rows if row.measured_s]
    found = fit(stated)
    kinds = {"dense": [not row.experts for row in stated], "experts": [row.experts for row in stated]}
    unseen = {"layout": validation.by_layout(stated, note), "cluster": validation.by_cluster(stated, note)}
    lines = [
        "# Written by: python -m tools.plan backtest tests/planner/published.csv --refit",
        f"# From {len(stated)} published runs; cost/constants.py says what each constant means.",
        "[constants]",
        *(f"{name} = {_short(value)}" for name, value in asdict(found).items()),
    ]
    for kind, chosen in kinds.items():
        lines += ["", f"[intervals.{kind}]", *_interval(stated, unseen["layout"], np.array(chosen))]
    for name, predicted in unseen.items():
        for kind, chosen in kinds.items():
            lines += ["", f"[unseen.{name}.{kind}]", *_scores(stated, predicted, np.array(chosen))]
    FITTED.write_text("\n".join(lines) + "\n")
    constants.fitted.cache_clear()
    constants.interval.cache_clear()
    write_points(rows)


def _short(value: float) -> str:
    return repr(float(f"{value:.{PLACES}g}"))


def _interval(rows: Sequence[PublishedRun], predicted: NDArray[np.float64], chosen: NDArray[np.bool_]) -> list[str]:
    """Measured over predicted, of layouts not seen: between the first and the last tenth."""
    ratio = (np.array([row.measured_s for row in rows]) / predicted)[chosen]
    low, high = np.quantile(ratio, [0.1, 0.9])
    return [f"low = {low:.3f}", f"high = {high:.3f}", f"runs = {int(chosen.sum())}"]


def _scores(rows: Sequence[PublishedRun], predicted: NDArray[np.float64], chosen: NDArray[np.bool_]) -> list[str]:
    own = [row for row, wanted in zip(rows, chosen, strict=True) if wanted]
    found, sequence = errors(own, predicted[chosen]), order(own, predicted[chosen])
    scores = asdict(found) | {"pair_order": sequence.right, "top1_regret": sequence.top1, "top3_regret": sequence.top3}
    return [f"{name} = {value if isinstance(value, int) else round(value, 4)}" for name, value in scores.items()]


def write_points(rows: Sequence[PublishedRun]) -> None:
    """What the planner's page draws: each run's seconds, measured and priced by the constants kept."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(PublishedPoint._fields)
    table.writerows(points_of(rows))
    POINTS.write_text(text.getvalue())


def points_of(rows: Sequence[PublishedRun]) -> list[PublishedPoint]:
    """Of rows with a measured time, rounded as they are kept."""
    stated = [row for row in rows if row.measured_s]
    predicted = validation.predicted_s(stated, constants.fitted())
    labels = [f"{row.text['model']} {row.cluster.name}" for row in stated]
    return [
        PublishedPoint(float(f"{row.measured_s:.4g}"), float(f"{guess:.4g}"), row.experts, label)
        for row, guess, label in zip(stated, predicted, labels, strict=True)
    ]
