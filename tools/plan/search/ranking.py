"""The order in which layouts are offered."""

import dataclasses
import math
from collections.abc import Sequence

from models.costs.candidate import Candidate
from tools.plan.search.pricing import PricedLayout

CLOSE = 0.02
"""Times within this share of each other are one to us: the simpler layout comes first."""
READ = 300
"""Plans that are put in order; the rest stay by time."""


def ranked(plans: Sequence[PricedLayout]) -> list[PricedLayout]:
    """Fastest first; among those within 2 % of the fastest that is left, the simplest first."""
    left = sorted(plans, key=lambda plan: plan.step_s)
    found: list[PricedLayout] = []
    while left and len(found) < READ:
        bound = left[0].step_s * (1 + CLOSE)
        count = next((number for number, plan in enumerate(left) if plan.step_s > bound), len(left))
        best = min(range(count), key=lambda number: (complexity(left[number]), left[number].step_s))
        found.append(left.pop(best))
    return found + left


def complexity(plan: PricedLayout) -> float:
    """What has to be understood, and can break: every doubling of an axis, twice for stages; uneven ones, shards,
    copies of them, recomputation, number formats."""
    layout = plan.layout
    axes = math.log2(layout.tp * layout.vpp * layout.cp * layout.ep * layout.etp) + 2 * math.log2(layout.pp)
    axes += (layout.zero > 1) + (layout.copies > 1)
    return axes + (layout.split != "even") + (layout.recompute != "none") + (layout.precision in ("fp8", "nvfp4"))


def distinct(plans: Sequence[PricedLayout]) -> list[PricedLayout]:
    """Without those that one in front of them differs from by less than 2 %, and in stages or recomputation alone."""
    found: dict[Candidate, list[PricedLayout]] = {}
    for plan in plans:
        alike = found.setdefault(_sizes(plan.layout), [])
        if all(abs(plan.step_s / other.step_s - 1) > CLOSE for other in alike):
            alike.append(plan)
    kept = {id(plan) for alike in found.values() for plan in alike}
    return [plan for plan in plans if id(plan) in kept]


def _sizes(layout: Candidate) -> Candidate:
    """Without how its blocks are dealt to stages and what is recomputed."""
    alike = dataclasses.replace(layout, vpp=1, split="even", first_layers=0, last_layers=0, chunk_layers=())
    return dataclasses.replace(alike, recompute="none")
