"""A configuration in the terms of the planner's formulas: its layout, and what the program does with memory."""

import math
from dataclasses import dataclass, replace
from typing import Any

from models.costs.candidate import ZERO, Candidate, Recompute
from models.costs.cases import MemoryCase
from models.costs.predict import of_stages, size
from models.costs.program import OURS, Software, encoded, sharded
from models.costs.sizes import sizes
from models.kernels import fusions_on
from models.shapes import GPTShape
from parallel.config import PrecisionConfig
from parallel.stages import layers_per_chunk
from training.config.activation_offload import offloaded_share
from training.config.optimizer_config import OptimizerConfig
from training.config.run_config import RunConfig, kernel_setting
from training.config.train_config import TrainConfig

LOGIT_BYTES = 2


@dataclass(kw_only=True, slots=True, frozen=True)
class Modules:
    """What a rank's model is made of."""

    cuda: bool
    """CUDA's context and NCCL's buffers come on top."""
    transformer_engine: bool


def planned_modules(config: RunConfig) -> Modules:
    """Of a run that is planned on another machine: on GPUs Transformer Engine's, but for ``device = "cpu"``."""
    gpu = config.device != "cpu"
    return Modules(cuda=gpu, transformer_engine=gpu)


def as_case(config: RunConfig, world_size: int, shape: GPTShape, modules: Modules) -> MemoryCase:
    """What ``models.costs.predict`` is asked."""
    return MemoryCase(
        model=sizes(shape, config.model.seq_length),
        layout=candidate(config, world_size, shape.num_layers),
        software=program(config, shape, modules),
    )


def bytes_on_cpus(config: RunConfig, world_size: int, shape: GPTShape) -> float:
    """All ranks together at the peak of a step, without processes and libraries."""
    case = as_case(config, world_size, shape, Modules(cuda=False, transformer_engine=False))
    stages = config.parallel.pipeline_model_parallel_size
    return sum(stage.tensors for stage in of_stages(case, shape, range(stages))) * world_size / stages


def too_little(node: str, needed: float, available: float) -> str:
    """On a node without GPUs."""
    return (
        f"{node} has {size(available)} of memory, and its ranks are predicted to hold {size(needed)} at the peak of a "
        "step, with processes and libraries on top: the kernel's OOM killer may end them (SIGKILL). Take a smaller "
        "model, micro batch or sequence, or a machine with more memory."
    )


def program(config: RunConfig, shape: GPTShape, modules: Modules) -> Software:
    """What memory depends on, of pretrain_gpt.py with these settings."""
    train = config.train
    wide = config.precision.dtype == "fp32" or config.precision.grad_reduce_in_fp32
    own = replace(
        OURS,
        cuda=modules.cuda,
        transformer_engine=modules.transformer_engine,
        main_gradient_bytes=4 if wide else 2,
        fp8_weights=config.precision.fp8_param_gather,
        loss_bytes=loss_bytes(config, shape, modules),
        loss_chunk_tokens=train.cross_entropy_chunk_tokens or math.inf,
        recompute_budget=math.inf if train.recompute_budget is None else train.recompute_budget,
        kept_blocks=_kept_share(config, shape),
        offloaded_blocks=train.cpu_offloading_num_layers if modules.cuda else 0,
        offloaded_modules=encoded(train.offload_modules if modules.transformer_engine else ()),
        offloaded_module_share=offloaded_share(config.model.megatron),
        **kept_state(config.optimizer),
        **kept_averages(config, modules.cuda),
    )
    return sharded(own, ZERO[config.parallel.sharding])


def loss_bytes(config: RunConfig, shape: GPTShape, modules: Modules) -> int:
    """``Software.loss_bytes``: Transformer Engine's cross entropy reads 16-bit logits, and overwrites them with their
    gradient; a start that finds it wrong takes the plain one (models/layers/cross_entropy.py), and holds more."""
    setting = kernel_setting(config, shape, modules.cuda, modules.transformer_engine)
    fused = "cross_entropy_loss_fusion" in fusions_on(config.kernels, setting)
    return LOGIT_BYTES if fused and not config.train.cross_entropy_chunk_tokens else OURS.loss_bytes


def _kept_share(config: RunConfig, shape: GPTShape) -> float:
    """``Software.kept_blocks``."""
    train = config.train
    if train.recompute_granularity != "full" or train.recompute_method != "block":
        return 0.0
    return max(0.0, 1 - (train.recompute_num_layers or 0) * config.parallel.chunks / shape.num_layers)


STATE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


def kept_averages(config: RunConfig, cuda: bool) -> dict[str, Any]:
    """Fields of Software: averages lie where the optimizer's weights do, or on the host. A CPU has one memory."""
    train, optimizer = config.train, config.optimizer
    size = 4.0 * ((train.ema_decay is not None) + (train.average_last is not None))
    away = optimizer.optimizer_offload_fraction * optimizer.optimizer_cpu_offload
    away = (1.0 if train.averages_on_host else away) * cuda
    return {"host_average_bytes": size * away, "average_bytes": size * (1 - away)}


def kept_state(optimizer: OptimizerConfig) -> dict[str, Any]:
    """Fields of Software; of a share that is offloaded, as if every parameter were cut there."""
    if optimizer.optimizer_cpu_offload:
        away = optimizer.optimizer_offload_fraction
        here = {"main_param_bytes": 4 * (1 - away), "moment_bytes": 8 * (1 - away)}
        return here | {"keeps_fp32_gradients": False, "host_state": away}
    if optimizer.use_precision_aware_optimizer:
        moments = STATE_BYTES[optimizer.exp_avg_dtype] + STATE_BYTES[optimizer.exp_avg_sq_dtype]
        return {"main_param_bytes": 2, "moment_bytes": moments, "keeps_fp32_gradients": False}
    return {"muon_steps": optimizer.muon_num_ns_steps if optimizer.optimizer == "muon" else 0}


def candidate(config: RunConfig, world_size: int, num_layers: int) -> Candidate:
    """The layout of a configuration, in the planner's terms."""
    layout, parallel, train = config.layout(world_size), config.parallel, config.train
    batch = config.batches.sizes()[-1]
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
