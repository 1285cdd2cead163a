"""Fits the constants and writes ``cost/fitted.toml``: constants, intervals, and how well unseen runs were met."""

from collections.abc import Callable, Sequence
from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from parallel.untrusted import read_toml
from tools.plan.backtest import validation
from tools.plan.backtest.fit import fit
from tools.plan.backtest.metrics import Errors, errors, order
from tools.plan.backtest.rows import PublishedRun
from tools.plan.cost import constants
from tools.plan.cost.constants import FITTED

PLACES = 5
"""Significant digits that are kept: more would pretend."""


def refit(rows: Sequence[PublishedRun], note: Callable[[str], None]) -> None:
    """Takes minutes: one fit of everything, one for each fold and each cluster that is left out."""
    stated = [row for row in rows if row.measured_s]
    found = fit(stated)
    kinds = {"dense": [not row.experts for row in stated], "experts": [row.experts for row in stated]}
    unseen = {"layout": validation.by_layout(stated, note), "cluster": validation.by_cluster(stated, note)}
    lines = [
        "# Written by: python -m tools.plan backtest tools/plan/backtest/published.csv --refit",
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


def kept() -> list[str]:
    """What the file says of runs that the constants had not seen."""
    if not FITTED.exists():
        return []
    lines = []
    for name, kinds in read_toml(FITTED)["unseen"].items():
        for kind, own in kinds.items():
            known = Errors(own["count"], own["mean"], own["median"], own["p90"], own["bias"])
            lines.append(
                f"{kind}, each {name} by constants fitted without it ({known.count} runs of published.csv): mean "
                f"{known.mean:.1%}, median {known.median:.1%}, p90 {known.p90:.1%}, bias {known.bias:+.1%}; pair order "
                f"{own['pair_order']:.3f}, top-1 regret {own['top1_regret']:.1%}, top-3 {own['top3_regret']:.1%}"
            )
    return lines
