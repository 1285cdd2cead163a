"""Predicted bytes: the door that every other room asks, for one layout or for thousands.

Weights, gradients and optimizer are exact; activations are those of the peak, within a few percent where the modules
are Transformer Engine's or ours and no ``megatron`` field changes them. What a run holds is measured by
training/memory/measured.py, and what a traced program allocates is counted by tools/plan/trace.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from models.costs.candidate import Candidate
from models.costs.cases import MemoryCase, MemoryColumns, PeakBytes, States
from models.costs.peak import AS_LAID_OUT, Recomputed, stage_memory
from models.costs.program import Software
from models.costs.recompute_plan import recompute_plans
from models.costs.states import BlockStack, HeldParameters, states
from models.shapes import GPTShape

SAFE_SHARE = 0.80
"""No run failed whose estimate stayed below this share of the card (arXiv:2411.06465)."""
SAFE_HOST_SHARE = 0.60
"""Of the host's memory. Torch rounds each pinned tensor up to a power of two, which adds 44 % where sizes are of all
magnitudes (1 / ln 2), to activations and to half of the optimizer's bytes; processes, data loaders and copies for
checkpoints come on top."""
CATEGORIES = ("weights", "gradients", "optimizer", "activations", "workspace")


@dataclass(kw_only=True, slots=True, frozen=True)
class Predicted:
    """Bytes on one rank at the peak of a step."""

    stage: int
    """Its pipeline stage."""
    weights: float
    gradients: float
    optimizer: float
    activations: float
    workspace: float
    """Libraries and fragmentation; 0 on a CPU."""
    host: float
    """In the host's memory, beside the process and its libraries; the others on the rank's device."""

    @property
    def tensors(self) -> float:
        """All but the workspace."""
        return self.weights + self.gradients + self.optimizer + self.activations

    @property
    def total(self) -> float:
        return self.tensors + self.workspace


def fullest(cases: Sequence[MemoryCase], shape: GPTShape) -> list[Predicted]:
    """Of each layout the rank that holds most. Of train.recompute: as much as is left of its budget."""
    found = memory(MemoryColumns(cases), [shape] * len(cases), [case.layout for case in cases])
    return [_predicted(found, number) for number in range(len(cases))]


def memory(columns: MemoryColumns, shapes: Sequence[GPTShape], layouts: Sequence[Candidate]) -> PeakBytes:
    """``fullest`` of thousands, as columns.

    Computes the first stage, the second, the last, and the first of those with the most mixtures of experts: others
    hold no more than these."""
    known = {key: BlockStack(shape) for key, shape in {id(shape): shape for shape in shapes}.items()}
    stacks = [known[id(shape)] for shape in shapes]
    looked_at = [
        [0] * len(layouts),
        [min(1, layout.pp - 1) for layout in layouts],
        [layout.pp - 1 for layout in layouts],
    ]
    if any(any(shape.moe_blocks) and not all(shape.moe_blocks) for shape in shapes):
        looked_at.append([stack.richest(layout) for stack, layout in zip(stacks, layouts, strict=True)])
    best, *others = (
        _within_budget(columns, stacks, layouts, stage_memory(columns, stacks, layouts, stages)) for stages in looked_at
    )
    for found in others:
        best = _fuller(best, found)
    return best


def _within_budget(
    columns: MemoryColumns, stacks: Sequence[BlockStack], layouts: Sequence[Candidate], found: PeakBytes
) -> PeakBytes:
    """Where train.recompute chooses: as much as is left of its budget, between all kept and all recomputed."""
    budget = columns.software.recompute_budget
    if np.any(np.isfinite(budget)):
        all_again = columns.recomputing("full")
        least = stage_memory(all_again, stacks, layouts, [int(stage) for stage in found.stage]).activations
        beside = found.total - found.activations
        found.activations = np.clip(budget - beside, np.minimum(least, found.activations), found.activations)
    return found


def _fuller(one: PeakBytes, other: PeakBytes) -> PeakBytes:
    more = other.total > one.total
    found = PeakBytes(*(np.where(more, getattr(other, name), getattr(one, name)) for name in PeakBytes.__slots__))
    found.host = np.maximum(one.host, other.host)
    return found


def of_stage(case: MemoryCase, shape: GPTShape, stage: int) -> Predicted:
    """A rank of one pipeline stage."""
    return of_stages(case, shape, [stage])[0]


def of_stages(case: MemoryCase, shape: GPTShape, stages: Sequence[int]) -> list[Predicted]:
    """A rank of each of these pipeline stages. Raises SharedMistake where train.recompute's budget is too small."""
    layouts, chosen = [case.layout] * len(stages), AS_LAID_OUT
    if plans := recompute_plans(case, shape):
        own = [plans[stage] for stage in stages]
        layouts = [replace(case.layout, recompute="full" if plan.whole_blocks else "none") for plan in own]
        chosen = Recomputed(*np.array([plan.memory for plan in own]).T)
    columns = MemoryColumns([replace(case, layout=layout) for layout in layouts])
    found = stage_memory(columns, [BlockStack(shape)] * len(stages), layouts, stages, chosen)
    return [_predicted(found, number) for number in range(len(stages))]


def of_share(shape: GPTShape) -> Callable[[Candidate, Software], States]:
    """Weights, gradients and optimizer of a rank that holds an even share of all parameters."""
    whole = BlockStack(shape).held(Candidate(), 0)

    def held(layout: Candidate, software: Software) -> States:
        ranks = layout.tp * layout.pp, layout.ep * layout.etp * layout.pp
        return states(HeldParameters(*(count // ranks[at % 2] for at, count in enumerate(whole))), layout, software)

    return held


def of_parameter(layout: Candidate, software: Software) -> States:
    """What one parameter takes on its ranks together: weights and gradients on each, optimizer state in all.

    The table in megatron-core's user guide, "Distributed Optimizer": 6 + 12/d for bf16 with fp32 gradients, 8 + 8/d
    for fp32. Gradients that are not fp32 have an fp32 copy while the optimizer steps.
    """
    return states(HeldParameters(1, 0, 1), replace(layout, dp=1, cp=1, copies=1), software)


def _predicted(found: PeakBytes, number: int) -> Predicted:
    return Predicted(
        **{name: float(getattr(found, name)[number]) for name in (*CATEGORIES, "host")},
        stage=int(found.stage[number]),
    )


def size(number: float) -> str:
    """``1.23 GiB``; below a tenth of one, MiB."""
    return f"{number / 2**30:.2f} GiB" if number >= 0.1 * 2**30 else f"{number / 2**20:.2f} MiB"


def largest_first(found: Predicted) -> str:
    """``optimizer 40.10 GiB, activations 12.00 GiB, ...``, without what is nothing."""
    held = {name: getattr(found, name) for name in CATEGORIES}
    return ", ".join(f"{name} {size(held[name])}" for name in sorted(held, key=lambda name: -held[name]) if held[name])
