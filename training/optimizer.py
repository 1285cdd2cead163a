"""AdamW (under Muon, too) or your own, through Megatron's optimizers: fp32 main weights, clipping, sharded state."""

import contextlib
import os
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer import (
    MegatronOptimizer,
    ParamKey,
    get_megatron_optimizer,
    get_mup_config_overrides,
    get_standard_config_overrides,
)
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig

from parallel.config import ParallelConfig, PrecisionConfig
from parallel.cpu.adam import FusedAdam
from parallel.ddp import Chunks
from parallel.groups import Ranks, own_cores
from parallel.megatron_fields import checked
from parallel.precision import optimizer_settings
from program.errors import SharedMistake
from training.config.lr_schedule import ScheduledRates
from training.config.optimizer_config import STATE_FIELDS, OptimizerConfig, state_problems
from training.loss_weights import weigh_losses
from training.optimizer_class import made_by, try_out
from training.optimizer_forms import form_of

STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}


def build(
    chunks: Chunks,
    optimizer: OptimizerConfig,
    parallel: ParallelConfig,
    precision: PrecisionConfig,
    ranks: Ranks,
    tokens_per_microbatch: int,
    width_mult: float = 1.0,
) -> MegatronOptimizer:
    """One optimizer for this rank's chunks. Its weight decay spares biases and norms, as Megatron's does.

    width_mult: of muP.

    Raises SharedMistake for an ``optimizer.optimizer`` of the user's that cannot be trained with.
    """
    on_host = parallel.fully_sharded and optimizer.optimizer_cpu_offload
    own = try_out(optimizer, parallel, "cpu" if on_host else ranks.device)
    if optimizer.optimizer_cpu_offload and os.environ.get("OMP_NUM_THREADS") == "1":  # as launchers set it
        torch.set_num_threads(own_cores(ranks.identity.local_world_size))
    settings: dict[str, Any] = {
        "optimizer": "adam",
        "lr": optimizer.lr,
        "min_lr": optimizer.min_lr,
        "decoupled_lr": optimizer.decoupled_lr,
        "decoupled_min_lr": optimizer.decoupled_min_lr,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.adam_beta1,
        "adam_beta2": optimizer.adam_beta2,
        "adam_eps": optimizer.adam_eps,
        "muon_scale_mode": optimizer.muon_scale_mode,  # read by a warning of muP
        "clip_grad": 0.0 if on_host else optimizer.clip_grad,
        "use_distributed_optimizer": parallel.sharding == "optim",
        "overlap_param_gather": parallel.overlap_param_gather and parallel.sharding == "optim",
    }
    # Shards are fp32 already, whatever weights are gathered in.
    stored = replace(precision, dtype="fp32") if parallel.fully_sharded else precision
    settings |= state_settings(optimizer, parallel, precision, ranks.device)
    settings |= optimizer_settings(stored) | checked("optimizer.megatron", optimizer.megatron, MegatronOptimizerConfig)
    # HybridDeviceOptimizer's parameters must be leaves, and megatron-core cuts shards of fp32 weights out of theirs.
    make = own.make if own is not None else FusedAdam if on_host else None
    config = MegatronOptimizerConfig(**settings)
    groups = get_standard_config_overrides(config) | _mup_overrides(config, optimizer.optimizer, width_mult)
    with made_by(make), torch.no_grad() if optimizer.optimizer_cpu_offload else contextlib.nullcontext():
        built = get_megatron_optimizer(
            config, list(chunks), groups, use_gloo_process_groups=False, pg_collection=ranks.pgs
        )
    if own is not None:
        for part in built.chained_optimizers:
            part.init_state_fn, part.state_names, part.is_own = own.allocate, lambda _: own.tensors, True
    for part in built.chained_optimizers:
        if part.optimizer is not None:  # or this rank has no parameter of its kind
            form_of(part).prepare()
    if parallel.sharding == "optim":
        gather_once(built)
    if parallel.fully_sharded:
        for part in built.chained_optimizers:  # the ranks that together hold all shards once
            part.grad_stats_parallel_group = ranks.pgs.intra_dist_opt
            if on_host and part.optimizer is not None:
                part.optimizer.register_step_pre_hook(partial(_clip, built, optimizer.clip_grad))
    weigh_losses(chunks[0].config, built, tokens_per_microbatch)
    return built


def state_settings(
    optimizer: OptimizerConfig, parallel: ParallelConfig, precision: PrecisionConfig, device: torch.device
) -> dict[str, Any]:
    """Fields of mcore's OptimizerConfig for where and how the state is kept (training/optimizer_forms.py).

    Raises SharedMistake on a device that cannot keep it so, which ``device = "auto"`` has found.
    """
    if problems := state_problems(optimizer, parallel, precision, cuda=device.type == "cuda"):
        raise SharedMistake("\n".join(problems))
    found: dict[str, Any] = {}
    if parallel.fully_sharded:
        return found
    if optimizer.use_precision_aware_optimizer or optimizer.optimizer_cpu_offload:
        # With it, megatron-core leaves the fp32 weights to the inner optimizer, and keeps none on the GPU.
        found["use_precision_aware_optimizer"] = True
        found |= {name: STATE_DTYPES[getattr(optimizer, name)] for name in STATE_FIELDS}
    if optimizer.optimizer_cpu_offload:
        found |= {
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": optimizer.optimizer_offload_fraction,
        }
    return found


def _clip(chain: MegatronOptimizer, largest: float, own: torch.optim.Optimizer, *_: Any) -> None:
    """Gradients in the host's memory, which megatron-core 0.19.2 does not clip."""
    coefficient = largest / (float(chain.get_grad_norm()) + 1e-6)
    if 0 < coefficient < 1:
        gradients = [param.grad for group in own.param_groups for param in group["params"] if param.grad is not None]
        torch._foreach_mul_(gradients, coefficient)


def gather_once(optimizer: MegatronOptimizer) -> None:
    """Of an optimizer's parts, for experts and for the rest, only the last one gathers the updated weights.

    megatron-core lets each gather those of all of them: a mixture's weights went over the network twice a step. What it
    does so for mxfp8 (PR 4800) it offers here, too.
    """
    *others, last = optimizer.chained_optimizers
    for part in others:
        part._defer_param_sync = part.model_chunks == last.model_chunks


def set_schedule(optimizer: MegatronOptimizer, rates: ScheduledRates) -> None:
    """Write this iteration's values into every parameter group, times the group's own multipliers."""
    for group in optimizer.param_groups:
        rate = rates.learning_rate
        scale = group.get("lr_mult", 1.0)
        # megatron-core marks groups with a rate of their own: decoupled ones, and muP's, which have a multiplier
        if rates.decoupled_learning_rate is not None and not group["default_config"] and scale == 1:
            rate = rates.decoupled_learning_rate
        group["lr"] = rate * scale
        group["weight_decay"] = rates.weight_decay * group.get("wd_mult", 1.0)


def _mup_overrides(config: MegatronOptimizerConfig, optimizer: str, width_mult: float) -> dict[ParamKey, Any]:
    """muP's learning rates (arXiv:2203.03466, table 8), by parameter group, as multiples of what a schedule says.

    megatron-core's, the same in every layout: of matrices within the blocks, rate and eps over the width; with Muon
    those that stay AdamW's, without the eps. Its own keep their rate, since Newton-Schulz gives updates of one size.
    """
    found: dict[ParamKey, Any] = {}
    for key, override in get_mup_config_overrides(config, width_mult, optimizer).items():
        found[key] = {"lr_mult": override["max_lr"] / config.lr} if "max_lr" in override else {}
        found[key] |= {"eps": override["eps"]} if "eps" in override else {}
    return found
