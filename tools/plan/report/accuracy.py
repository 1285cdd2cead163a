"""How well published runs were met: what ``backtest --refit`` (tests/planner) has kept of them, as data."""

import csv
import io
from pathlib import Path
from typing import NamedTuple

from program.untrusted import read_text, read_toml
from tools.plan.cost.constants import FITTED

POINTS = Path(__file__).with_name("published.csv")


class PublishedPoint(NamedTuple):
    """One published run: seconds of a step, measured and priced."""

    measured_s: float
    predicted_s: float
    experts: bool
    label: str


def points() -> list[PublishedPoint]:
    """Of the runs whose step was measured."""
    _, *rows = csv.reader(io.StringIO(read_text(POINTS)))
    return [
        PublishedPoint(float(measured), float(predicted), experts == "True", label)
        for measured, predicted, experts, label in rows
    ]


def unseen() -> list[str]:
    """Errors over runs that the constants had not seen, a line for each way of leaving some out."""
    if not FITTED.exists():
        return []
    lines = []
    for name, kinds in read_toml(FITTED)["unseen"].items():
        for kind, own in kinds.items():
            lines.append(
                f"{kind}, each {name} by constants fitted without it ({own['count']} runs of published.csv): mean "
                f"{own['mean']:.1%}, median {own['median']:.1%}, p90 {own['p90']:.1%}, bias {own['bias']:+.1%}; "
                f"pair order {own['pair_order']:.3f}, top-1 regret {own['top1_regret']:.1%}, "
                f"top-3 {own['top3_regret']:.1%}"
            )
    return lines
