"""Moves the constants of ``cost`` from their priors as far as measured runs insist.

Levenberg-Marquardt on logarithms: residuals ln(predicted / measured), robust (soft L1: a mislabelled row pulls little),
with every constant tied to its prior. Repeats of one layout, and of one card and number format, weigh less each.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import numpy as np
from numpy.typing import NDArray

from tests.planner.rows import PublishedRun
from tools.plan.cost.cases import PricedColumns
from tools.plan.cost.constants import ASSUMED, EXPERTS_ONLY, Constants
from tools.plan.cost.step import step_times

SPREAD = 0.035
"""Error, as a logarithm, that is taken for noise: somewhat more than the 2.5 % by which the same dense layout differs,
on average, between software releases. Less follows the noise: constants leave what is physical, and unseen clusters
are met worse."""
TIED = 0.20
"""How far from its prior a constant may move for free, as a logarithm."""
LOOSE = {
    "fixed_s": 1.0, "jitter": 0.7, "launch_s": 0.4, "expert_host_s": 0.7, "expert_wait_s": 1.0,
    "contention": 0.6, "traffic_plain": 0.4, "traffic_fused": 0.4, "traffic_cast": 0.5, "score_passes": 0.4,
    "expert_traffic": 0.5, "product_bytes": 0.5, "p2p": 0.4, "p2p_hidden": 0.6, "dp_plain": 0.4,
    "optimizer": 0.4, "flash_ramp": 0.7, "misaligned": 0.08,
}  # fmt: skip
"""Those whose prior is less sure (or, last, surer)."""


def fit(rows: Sequence[PublishedRun], start: Constants | None = None) -> Constants:
    """Constants of dense models from dense rows; then those of experts from the rest."""
    prior = Constants()
    names = [field.name for field in fields(Constants) if field.name not in EXPERTS_ONLY + ASSUMED]
    dense = [row for row in rows if not row.experts and row.measured_s]
    experts = [row for row in rows if row.experts and row.measured_s]
    found = _fit(dense, names, start or prior, prior) if dense else prior
    return _fit(experts, list(EXPERTS_ONLY), found, prior) if experts else found


def _fit(rows: Sequence[PublishedRun], names: list[str], start: Constants, prior: Constants) -> Constants:
    columns = PricedColumns([row.case for row in rows])
    measured = np.log([row.measured_s or 1.0 for row in rows])
    weights = row_weights(rows)
    centre = np.log([getattr(prior, name) for name in names])
    ties = np.array([LOOSE.get(name, TIED) for name in names])

    def errors(x: NDArray[np.float64]) -> NDArray[np.float64]:
        constants = replace(start, **dict(zip(names, np.exp(x).tolist(), strict=True)))
        return np.asarray((np.log(step_times(columns, constants).total) - measured) / SPREAD)

    x = np.log([getattr(start, name) for name in names])
    best = _minimise(errors, x, weights, centre, ties)
    return replace(start, **dict(zip(names, np.exp(best).tolist(), strict=True)))


def row_weights(rows: Sequence[PublishedRun]) -> NDArray[np.float64]:
    """One layout counts as the root of its repeats; so does a card in one number format."""
    repeats = Counter(row.layout_key for row in rows)
    cells = Counter((row.text.get("gpu"), row.case.layout.precision) for row in rows)
    return np.array(
        [
            repeats[row.layout_key] ** -0.5 * cells[(row.text.get("gpu"), row.case.layout.precision)] ** -0.25
            for row in rows
        ]
    )


def _minimise(
    errors: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    x: NDArray[np.float64],
    weights: NDArray[np.float64],
    centre: NDArray[np.float64],
    ties: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Damped Gauss-Newton with weights renewed at each step (soft L1 of the errors)."""
    damping, best = 1e-2, _loss(errors(x), weights, (x - centre) / ties)
    for _ in range(25):
        error, slopes = errors(x), _slopes(errors, x)
        robust = weights / np.sqrt(1 + error**2)
        hessian = slopes.T @ (robust[:, None] * slopes) + np.diag(1 / ties**2)
        gradient = slopes.T @ (robust * error) + (x - centre) / ties**2
        for _ in range(6):
            step = np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), -gradient)
            trial = x + np.clip(step, -0.5, 0.5)
            loss = _loss(errors(trial), weights, (trial - centre) / ties)
            if loss < best:
                break
            damping *= 5
        else:
            return x
        settled = best - loss < 1e-4 * best
        x, best, damping = trial, loss, damping / 3
        if settled:
            return x
    return x


def _loss(error: NDArray[np.float64], weights: NDArray[np.float64], tie: NDArray[np.float64]) -> float:
    return float(np.sum(weights * 2 * (np.sqrt(1 + error**2) - 1)) + np.sum(tie**2))


def _slopes(
    errors: Callable[[NDArray[np.float64]], NDArray[np.float64]], x: NDArray[np.float64]
) -> NDArray[np.float64]:
    base, found = errors(x), []
    for number in range(len(x)):
        moved = x.copy()
        moved[number] += 1e-3
        found.append((errors(moved) - base) / 1e-3)
    return np.stack(found, axis=1)
