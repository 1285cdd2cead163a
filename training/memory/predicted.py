"""What each configuration holds on its fullest rank, by the formulas that tools.plan ranks layouts with.

Weights, gradients and optimizer are exact; activations are those of the peak, within a few percent where the modules
are Transformer Engine's or ours and no ``megatron`` field changes them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from models.shapes import GPTShape
from models.sizes import sizes
from parallel.config import ParallelConfig, PrecisionConfig
from parallel.stages import layers_per_chunk
from training.config.optimizer_config import OptimizerConfig
from training.config.run_config import RunConfig, batch_schedule
from training.config.train_config import TrainConfig
from training.memory.cases import Column, MemoryCase, MemoryColumns
from training.memory.layouts import ZERO, Candidate, Recompute
from training.memory.peak import PeakBytes, memory, stage_memory
from training.memory.software import OURS, Software, sharded
from training.memory.stage_parameters import product_copies
from training.memory.states import BlockStack, HeldParameters, States, states

CATEGORIES = ("weights", "gradients", "optimizer", "activations", "workspace")


@dataclass(kw_only=True, slots=True, frozen=True)
class Planned:
    """A configuration on so many ranks."""

    config: RunConfig
    world_size: int


@dataclass(kw_only=True, slots=True, frozen=True)
class Modules:
    """What a rank's model is made of."""

    cuda: bool
    """CUDA's context and NCCL's buffers come on top."""
    transformer_engine: bool


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
    columns = _columns(planned, layouts, shape, modules)
    found = memory(columns, [shape] * len(layouts), layouts)
    found.activations = _some_recomputed(planned, layouts, shape, modules, found)
    found.activations = _some_offloaded(planned, layouts, shape, modules, found)
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
    stack = [BlockStack(shape)] * len(stages)
    found = stage_memory(_columns(planned, layouts, shape, modules), stack, layouts, stages)
    found.activations = _some_recomputed(planned, layouts, shape, modules, found)
    found.activations = _some_offloaded(planned, layouts, shape, modules, found)
    return [_predicted(found, number, modules) for number in range(len(stages))]


def planned_modules(config: RunConfig) -> Modules:
    """Of a run that is planned on another machine: on GPUs Transformer Engine's, but for ``device = "cpu"``."""
    gpu = config.device != "cpu"
    return Modules(cuda=gpu, transformer_engine=gpu)


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


def _columns(
    planned: Sequence[Planned], layouts: Sequence[Candidate], shape: GPTShape, modules: Modules
) -> MemoryColumns:
    model = sizes(shape, planned[0].config.model.seq_length)
    programs = [program(each.config, modules) for each in planned]
    return MemoryColumns(
        [MemoryCase(model=model, layout=layout, software=own) for layout, own in zip(layouts, programs, strict=True)]
    )


def _predicted(found: PeakBytes, number: int, modules: Modules) -> Predicted:
    return Predicted(
        stage=int(found.stage[number]),
        weights=float(found.weights[number]),
        gradients=float(found.gradients[number]),
        optimizer=float(found.optimizer[number]),
        activations=float(found.activations[number]),
        workspace=float(found.workspace[number]) if modules.cuda else 0.0,
    )


def _some_recomputed(
    planned: Sequence[Planned], layouts: Sequence[Candidate], shape: GPTShape, modules: Modules, found: PeakBytes
) -> Column:
    """The block method recomputes only the first layers of each chunk: in between, by their share."""
    shares = np.array([_kept_share(each, shape) for each in planned])
    if not np.any(shares > 0):
        return found.activations
    kept = [replace(layout, recompute="none") for layout in layouts]
    stacks, stages = [BlockStack(shape)] * len(layouts), [int(stage) for stage in found.stage]
    whole = stage_memory(_columns(planned, kept, shape, modules), stacks, kept, stages).activations
    return found.activations * (1 - shares) + whole * shares


def _some_offloaded(
    planned: Sequence[Planned], layouts: Sequence[Candidate], shape: GPTShape, modules: Modules, found: PeakBytes
) -> Column:
    """Of blocks whose activations wait on the host, a GPU holds about what full recomputation holds: those of the block
    that computes, and for those that are on their way as much as each block's input is there."""
    shares = np.array([_offloaded_share(each, shape) for each in planned]) * modules.cuda
    if not np.any(shares > 0):
        return found.activations
    lean = [replace(layout, recompute="full") for layout in layouts]
    stacks, stages = [BlockStack(shape)] * len(layouts), [int(stage) for stage in found.stage]
    least = stage_memory(_columns(planned, lean, shape, modules), stacks, lean, stages).activations
    return found.activations * (1 - shares) + np.minimum(least, found.activations) * shares


def _offloaded_share(planned: Planned, shape: GPTShape) -> float:
    blocks = planned.config.train.cpu_offloading_num_layers * _chunks(planned.config.parallel)
    return min(1.0, blocks / shape.num_layers)


def _kept_share(planned: Planned, shape: GPTShape) -> float:
    train, parallel = planned.config.train, planned.config.parallel
    if train.recompute_granularity != "full" or train.recompute_method != "block":
        return 0.0
    return max(0.0, 1 - (train.recompute_num_layers or 0) * _chunks(parallel) / shape.num_layers)


def _chunks(parallel: ParallelConfig) -> int:
    return parallel.pipeline_model_parallel_size * (parallel.virtual_pipeline_model_parallel_size or 1)


def program(config: RunConfig, modules: Modules) -> Software:
    """What memory depends on, of pretrain_gpt.py with these settings."""
    wide = config.precision.dtype == "fp32" or config.precision.grad_reduce_in_fp32
    own = replace(
        OURS,
        transformer_engine=modules.transformer_engine,
        main_gradient_bytes=4 if wide else 2,
        fp8_weights=config.precision.fp8_param_gather,
        loss_chunk_tokens=config.train.cross_entropy_chunk_tokens or math.inf,
        **kept_state(config.optimizer),
    )
    return sharded(own, ZERO[config.parallel.sharding])


STATE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


def kept_state(optimizer: OptimizerConfig) -> dict[str, Any]:
    """Fields of Software; of a share that is offloaded, as if every parameter were cut there."""
    if optimizer.optimizer_cpu_offload:
        away = optimizer.optimizer_offload_fraction
        here = {"main_param_bytes": 4 * (1 - away), "moment_bytes": 8 * (1 - away)}
        return here | {"keeps_fp32_gradients": False, "host_state": away}
    if optimizer.use_precision_aware_optimizer:
        moments = STATE_BYTES[optimizer.exp_avg_dtype] + STATE_BYTES[optimizer.exp_avg_sq_dtype]
        return {"main_param_bytes": 2, "moment_bytes": moments, "keeps_fp32_gradients": False}
    return {}


def candidate(config: RunConfig, world_size: int, num_layers: int) -> Candidate:
    """The layout of a configuration, in the planner's terms."""
    layout, parallel, train = config.layout(world_size), config.parallel, config.train
    batch = batch_schedule(train).sizes()[-1]
    return Candidate(
        tp=layout.tp,
        pp=layout.pp,
        vpp=layout.vpp,
        cp=layout.cp,
        ep=layout.ep,
        etp=layout.etp,
        dp=layout.dp,
        mbs=train.micro_batch_size,
        microbatches=max(1, batch // (train.micro_batch_size * layout.dp)),
        recompute=_recompute(train),
        zero=ZERO[parallel.sharding],
        copies=parallel.num_distributed_optimizer_instances,
        overlap=parallel.overlap_grad_reduce or parallel.fully_sharded,
        sequence_parallel=parallel.sequence_parallel,
        precision=planned_precision(config.precision),
        chunk_layers=tuple(layers_per_chunk(parallel, num_layers)),
    )


def planned_precision(precision: PrecisionConfig) -> str:
    """As the planner names what is multiplied in: bf16, fp16, fp32, fp8, nvfp4."""
    return {"fp8": "fp8", "fp4": precision.fp4_recipe}.get(precision.products or "", precision.dtype)


def _recompute(train: TrainConfig) -> Recompute:
    """Of several selected modules the largest; flash attention leaves nothing of core_attn to be saved."""
    if train.recompute_granularity == "full":
        return "full"
    if train.recompute_granularity == "selective":
        if "moe" in train.recompute_modules:
            return "moe"
        return "mlp" if "mlp" in train.recompute_modules else "none"
    return "none"


def size(number: float) -> str:
    """``1.23 GiB``; below a tenth of one, MiB."""
    return f"{number / 2**30:.2f} GiB" if number >= 0.1 * 2**30 else f"{number / 2**20:.2f} MiB"


def largest_first(found: Predicted) -> str:
    """``optimizer 40.10 GiB, activations 12.00 GiB, ...``, without what is nothing."""
    held = {name: getattr(found, name) for name in CATEGORIES}
    return ", ".join(f"{name} {size(held[name])}" for name in sorted(held, key=lambda name: -held[name]) if held[name])
