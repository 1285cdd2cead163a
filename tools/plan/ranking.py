"""The order in which layouts are offered. No torch here."""

from collections.abc import Sequence

from tools.plan.pricing import Plan

CLOSE = 0.02
"""Times within this share of each other are one to us: the simpler layout comes first."""


def ranked(plans: Sequence[Plan]) -> list[Plan]:
    """Fastest first; among those within 2 % of the fastest that is left, the simplest first."""
    left, found = sorted(plans, key=lambda plan: plan.step_s), []
    while left:
        bound = left[0].step_s * (1 + CLOSE)
        count = next((number for number, plan in enumerate(left) if plan.step_s > bound), len(left))
        best = min(left[:count], key=lambda plan: (complexity(plan), plan.step_s))
        found.append(best)
        left.remove(best)
        if len(found) >= 50:  # nobody reads further
            return found + left
    return found


def complexity(plan: Plan) -> int:
    """What has to be understood, and can break: axes, interleaving, uneven stages, recomputation, number formats."""
    layout = plan.layout
    axes = (layout.tp > 1) + 2 * (layout.pp > 1) + (layout.vpp > 1) + (layout.cp > 1) + (layout.ep > 1)
    extras = (layout.etp > 1) + (layout.split != "even") + (layout.recompute != "none") + (layout.precision == "fp8")
    return axes + extras + 3 * (not plan.runs_today)
