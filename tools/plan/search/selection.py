"""Which layouts are offered, in which order: one answer for the table, recipes, sizing and pictures."""

from collections.abc import Sequence

from models.costs.candidate import Candidate
from program.errors import UserError
from tools.plan.search.enumeration import candidates
from tools.plan.search.pricing import PricedLayout, price
from tools.plan.search.ranking import ranked
from tools.plan.search.recipe import problems
from tools.plan.search.request import PlanRequest
from training.config.run_config import RunConfig

KEPT = 300
"""Plans of each kind that are worked out in full; the rest stay two numbers."""


def best(question: PlanRequest, base: RunConfig | None = None) -> PricedLayout | None:
    """The plan that is offered; None where nothing fits that goes with the rest of a recipe."""
    _, accepted = _fitting(question, candidates(question), base)
    return accepted[0] if accepted else None


def fitting(question: PlanRequest, layouts: Sequence[Candidate], base: RunConfig | None = None) -> list[PricedLayout]:
    """Plans that fit, the best first; over a recipe, those that the program accepts with the rest of it.

    Raises UserError where some fit, and the recipe forbids them all.
    """
    plans, accepted = _fitting(question, layouts, base)
    if base is None or accepted or not plans:
        return accepted
    first = ranked(plans)[0]
    raise UserError(
        f"the recipe forbids every layout that fits. Of the fastest, {first.layout}, pretrain_gpt.py says:\n  "
        + "\n  ".join(problems(question, first.layout, base))
        + "\nChange that in the recipe, or plan with fewer constraints or for another number of GPUs."
    )


def _fitting(
    question: PlanRequest, layouts: Sequence[Candidate], base: RunConfig | None
) -> tuple[Sequence[PricedLayout], list[PricedLayout]]:
    """The fastest that fit; and those, or slower ones, that the program accepts with the rest of a recipe, ranked."""
    plans = [plan for plan in price(question, layouts, keep=KEPT) if plan.fits]
    if base is None or not plans:
        return plans, ranked(plans)
    accepted = _accepted(question, plans, base)
    if not accepted:  # slower ones, then
        accepted = _accepted(question, [plan for plan in price(question, layouts) if plan.fits], base)
    return plans, ranked(accepted)


def _accepted(question: PlanRequest, plans: Sequence[PricedLayout], base: RunConfig) -> list[PricedLayout]:
    """One check for all that are alike in what the rest of a recipe can clash with; ``write`` checks its own again."""
    known: dict[tuple[int | str, ...], bool] = {}
    found = []
    for plan in plans:
        at = plan.layout
        sizes = (at.tp, at.cp, at.pp, at.vpp, at.dp, at.ep, at.etp, at.mbs, at.zero, at.copies, at.precision)
        if sizes not in known:
            known[sizes] = not problems(question, at, base)
        if known[sizes]:
            found.append(plan)
    return found
