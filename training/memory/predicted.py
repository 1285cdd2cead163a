"""What each configuration holds on its fullest rank, by the formulas that tools.plan ranks layouts with.

Weights, gradients and optimizer are exact; activations are those of the peak, within a few percent where the modules
are Transformer Engine's or ours and no ``megatron`` field changes them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from models.costs.candidate import Candidate, Recompute
from models.costs.cases import Column
from models.costs.peak import AS_LAID_OUT, PeakBytes, Recomputed, memory, stage_memory
from models.costs.stage_parameters import product_copies
from models.costs.states import BlockStack, HeldParameters, States, states
from models.shapes import GPTShape
from parallel.config import ParallelConfig
from training.config.run_config import RunConfig
from training.config.train_config import TrainConfig, recompute_budget
from training.memory.planned import Modules, Planned, candidate, columns_of, planned_modules, program
from training.memory.recompute_plan import recompute_plans

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


def fullest(planned: Sequence[Planned], shape: GPTShape, modules: Modules) -> list[Predicted]:
    """Of each configuration the rank that holds most."""
    layouts = [candidate(each.config, each.world_size, shape.num_layers) for each in planned]
    columns = columns_of(planned, layouts, shape, modules)

    def adjusted(found: PeakBytes) -> PeakBytes:
        found.activations, found.host = _some_recomputed(planned, layouts, shape, modules, found)
        found.activations = _within_budgets(planned, layouts, shape, modules, found)
        return found

    found = memory(columns, [shape] * len(layouts), layouts, adjusted)
    return [_predicted(found, number, modules) for number in range(len(layouts))]


def of_stage(config: RunConfig, world_size: int, shape: GPTShape, modules: Modules, stage: int) -> Predicted:
    """A rank of one pipeline stage."""
    return of_stages(config, world_size, shape, modules, [stage])[0]


def of_stages(
    config: RunConfig, world_size: int, shape: GPTShape, modules: Modules, stages: Sequence[int]
) -> list[Predicted]:
    """A rank of each of these pipeline stages."""
    planned = [Planned(config=config, world_size=world_size)] * len(stages)
    layouts = [candidate(config, world_size, shape.num_layers)] * len(stages)
    stack, chosen = [BlockStack(shape)] * len(stages), AS_LAID_OUT
    if config.train.recompute is not None:
        plans = recompute_plans(config, world_size, shape, modules)
        own = [plans[stage] for stage in stages]
        layouts = [
            replace(layout, recompute="full" if plan.whole_blocks else "none")
            for layout, plan in zip(layouts, own, strict=True)
        ]
        chosen = Recomputed(*np.array([plan.memory for plan in own]).T)
    found = stage_memory(columns_of(planned, layouts, shape, modules), stack, layouts, stages, chosen)
    found.activations, found.host = _some_recomputed(planned, layouts, shape, modules, found)
    return [_predicted(found, number, modules) for number in range(len(stages))]


def bytes_per_parameter(config: RunConfig, world_size: int, num_layers: int) -> States:
    """What one parameter takes on its ranks together: weights and gradients on each, optimizer state in all.

    The table in megatron-core's user guide, "Distributed Optimizer": 6 + 12/d for bf16 with fp32 gradients, 8 + 8/d
    for fp32. Gradients that are not fp32 have an fp32 copy while the optimizer steps.
    """
    layout, software = candidate(config, world_size, num_layers), program(config, planned_modules(config))
    alone = replace(layout, dp=1, cp=1, copies=1)
    own = states(HeldParameters(1, 0), alone, software)
    casts = 0 if config.parallel.fully_sharded else product_copies(config.precision)
    return own._replace(weights=own.weights + casts)


def _predicted(found: PeakBytes, number: int, modules: Modules) -> Predicted:
    return Predicted(
        stage=int(found.stage[number]),
        weights=float(found.weights[number]),
        gradients=float(found.gradients[number]),
        optimizer=float(found.optimizer[number]),
        activations=float(found.activations[number]),
        workspace=float(found.workspace[number]) if modules.cuda else 0.0,
        host=float(found.host[number]),
    )


def _some_recomputed(
    planned: Sequence[Planned], layouts: Sequence[Candidate], shape: GPTShape, modules: Modules, found: PeakBytes
) -> tuple[Column, Column]:
    """The block method recomputes only the first layers of each chunk: in between, by their share. Activations, and
    what is on the host."""
    shares = np.array([_kept_share(each, shape) for each in planned])
    if not np.any(shares > 0):
        return found.activations, found.host
    whole, host = _if_recomputed("none", shares > 0, planned, layouts, shape, modules, found)
    return found.activations * (1 - shares) + whole * shares, found.host * (1 - shares) + host * shares


def _within_budgets(
    planned: Sequence[Planned], layouts: Sequence[Candidate], shape: GPTShape, modules: Modules, found: PeakBytes
) -> Column:
    """Where train.recompute chooses: as much as is left of its budget, between all kept and all recomputed."""
    budgets = np.array([_budget(each.config.train) for each in planned])
    if np.all(np.isinf(budgets)):
        return found.activations
    beside = found.total - found.activations - (0.0 if modules.cuda else found.workspace)
    least, _ = _if_recomputed("full", np.isfinite(budgets), planned, layouts, shape, modules, found)
    return np.clip(budgets - beside, np.minimum(least, found.activations), found.activations)


def _budget(train: TrainConfig) -> float:
    return math.inf if train.recompute is None else recompute_budget(train.recompute)


def _if_recomputed(
    recompute: Recompute, where: NDArray[np.bool_], planned: Sequence[Planned], layouts: Sequence[Candidate],
    shape: GPTShape, modules: Modules, found: PeakBytes,
) -> tuple[Column, Column]:  # fmt: skip
    """Activations of the same stages, and what is on the host, if all their blocks were recomputed so; elsewhere as
    found."""
    at = np.flatnonzero(where).tolist()
    own, stages = [replace(layouts[number], recompute=recompute) for number in at], found.stage[at].astype(int)
    columns = columns_of([planned[number] for number in at], own, shape, modules)
    again = stage_memory(columns, [BlockStack(shape)] * len(own), own, list(stages))
    activations, host = found.activations.copy(), found.host.copy()
    activations[at], host[at] = again.activations, again.host
    return activations, host


def _kept_share(planned: Planned, shape: GPTShape) -> float:
    train, parallel = planned.config.train, planned.config.parallel
    if train.recompute_granularity != "full" or train.recompute_method != "block":
        return 0.0
    return max(0.0, 1 - (train.recompute_num_layers or 0) * _chunks(parallel) / shape.num_layers)


def _chunks(parallel: ParallelConfig) -> int:
    return parallel.pipeline_model_parallel_size * (parallel.virtual_pipeline_model_parallel_size or 1)


def size(number: float) -> str:
    """``1.23 GiB``; below a tenth of one, MiB."""
    return f"{number / 2**30:.2f} GiB" if number >= 0.1 * 2**30 else f"{number / 2**20:.2f} MiB"


def largest_first(found: Predicted) -> str:
    """``optimizer 40.10 GiB, activations 12.00 GiB, ...``, without what is nothing."""
    held = {name: getattr(found, name) for name in CATEGORIES}
    return ", ".join(f"{name} {size(held[name])}" for name in sorted(held, key=lambda name: -held[name]) if held[name])
