"""AdamW, or the user's own, through Megatron's optimizers: fp32 main weights, clipping, loss scaling, sharded state."""

from dataclasses import replace
from typing import Any

from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from parallel.config import ParallelConfig, PrecisionConfig
from parallel.ddp import Chunk, Chunks
from parallel.groups import Ranks
from parallel.megatron_fields import checked
from parallel.precision import optimizer_settings
from training.config.run_config import OptimizerConfig
from training.optimizer_class import made_by, try_out


def build(
    chunks: Chunks,
    optimizer: OptimizerConfig,
    parallel: ParallelConfig,
    precision: PrecisionConfig,
    ranks: Ranks,
    tokens_per_microbatch: int,
) -> MegatronOptimizer:
    """One optimizer for this rank's chunks. Its weight decay spares biases and norms, as Megatron's does.

    Raises SharedMistake for an ``optimizer.optimizer`` of the user's that cannot be trained with.
    """
    own = try_out(optimizer, parallel, ranks.device)
    settings: dict[str, Any] = {
        "optimizer": "adam",
        "lr": optimizer.lr,
        "min_lr": optimizer.min_lr,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.adam_beta1,
        "adam_beta2": optimizer.adam_beta2,
        "adam_eps": optimizer.adam_eps,
        "clip_grad": optimizer.clip_grad,
        "use_distributed_optimizer": parallel.sharding == "optim",
        "overlap_param_gather": parallel.overlap_param_gather and parallel.sharding == "optim",
    }
    # Shards are fp32 already, whatever weights are gathered in.
    stored = replace(precision, dtype="fp32") if parallel.fully_sharded else precision
    settings |= optimizer_settings(stored) | checked("optimizer.megatron", optimizer.megatron, MegatronOptimizerConfig)
    with made_by(own):
        built = get_megatron_optimizer(
            MegatronOptimizerConfig(**settings), list(chunks), use_gloo_process_groups=False, pg_collection=ranks.pgs
        )
    if own is not None:
        for part in built.chained_optimizers:
            part.init_state_fn, part.state_names = own.allocate, own.tensors
    if parallel.sharding == "optim":
        gather_once(built)
    if parallel.fully_sharded:
        for part in built.chained_optimizers:  # the ranks that together hold all shards once
            part.grad_stats_parallel_group = ranks.pgs.intra_dist_opt
    scale_backward(chunks[0].config, built, tokens_per_microbatch)
    return built


def gather_once(optimizer: MegatronOptimizer) -> None:
    """Of an optimizer's parts, for experts and for the rest, only the last one gathers the updated weights.

    megatron-core lets each gather those of all of them: a mixture's weights went over the network twice a step. What it
    does so for mxfp8 (PR 4800) it offers here, too.
    """
    *others, last = optimizer.chained_optimizers
    for part in others:
        part._defer_param_sync = part.model_chunks == last.model_chunks


def scale_backward(config: TransformerConfig, optimizer: MegatronOptimizer, tokens_per_microbatch: int) -> None:
    """Run the backward pass on losses the size of a mean, though gradients are divided by the exact token count.

    Megatron backpropagates each microbatch's *sum* of losses and divides at the end, which overflows fp16 at a scale
    that shrinks with the sequence. A power of two is taken off before and given back after: exact in every format.
    """
    shrink = float(1 << (tokens_per_microbatch.bit_length() - 1))
    finalize = config.finalize_model_grads_func

    def finalize_shrunk(model: list[Chunk], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
        finalize(model, None if num_tokens is None else num_tokens.float() / shrink, **kwargs)

    config.grad_scale_func = lambda loss: optimizer.scale_loss(loss) / shrink
    config.finalize_model_grads_func = finalize_shrunk


def set_schedule(optimizer: MegatronOptimizer, learning_rate: float, weight_decay: float) -> None:
    """Write this iteration's values into every parameter group, times the group's own multipliers."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("lr_mult", 1.0)
        group["weight_decay"] = weight_decay * group.get("wd_mult", 1.0)
