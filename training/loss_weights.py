"""What each loss weighs in a step's gradients, whatever the cut into microbatches, replicas and context ranks.

| loss | what it is |
|---|---|
| cross entropy | mean over the unmasked tokens of the global batch |
| multi-token prediction, each depth | mean over those of them that have a token to predict at that depth |
| balancing loss, z loss of routers | mean over microbatches and replicas; masked tokens are routed, and count |

megatron-core 0.19.2 divides summed gradients by the unmasked tokens (calculate_per_token_loss). It multiplies the
routers' losses by *all* tokens of a microbatch before, so that they grew with what is masked, and each depth's by a
quotient of one microbatch, so that they depended on the cut.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from data.loader import Batch
from models.layers.token_counts import TokenCounts, set_token_counts, token_counts
from models.shapes import GPTShape
from parallel.ddp import Chunk, Chunks
from parallel.groups import Ranks
from training.batches import zigzag


def count_tokens(chunks: Chunks, microbatches: Sequence[Batch | None], ranks: Ranks) -> None:
    """Count what the losses of this global batch count, before a backward pass needs it. Collective: one all-reduce of
    a few numbers over all ranks, in place of Megatron's two at the end."""
    config = chunks[0].config
    depths = config.mtp_num_layers or 0
    own = torch.zeros(2 + depths, dtype=torch.float64, device=ranks.device)
    if ranks.is_last_stage and ranks.at.tp == 0:
        masks = torch.stack([batch.loss_mask for batch in microbatches if batch is not None])
        own[0] = masks.sum(dtype=torch.float64)
        own[1].fill_(masks.numel())  # by a kernel: a number that is assigned is copied, and waited for
        for depth in range(depths):  # targets move by one token a depth: the first ones are no depth's target any more
            targets = masks * (own_positions(masks.shape[-1], ranks) > depth)
            own[2 + depth] = targets.sum(dtype=torch.float64)
    dist.all_reduce(own)
    found = own.clamp_(min=1.0).float()
    set_token_counts(config, TokenCounts(counted=found[0], share=found[0] / found[1], depths=found[2:]))


def own_positions(length: int, ranks: Ranks) -> Tensor:
    """Positions in the sample of a context rank's ``length`` tokens, [length] int64."""
    cp = ranks.layout.cp
    whole = torch.arange(length * cp, device=ranks.device)
    return whole if cp == 1 else zigzag(whole[None], cp, ranks.at.cp)[0]


def layout_dependent(shape: GPTShape) -> str:
    """What of a model's numbers depends on the layout by definition, in one line; "" where nothing does."""
    if not shape.num_moe_experts:
        return ""
    balancing = shape.moe_router_load_balancing_type if shape.moe_aux_loss_coeff else ""
    found = {
        "global_aux_loss, over what all replicas have routed of an iteration so far, on DP and the micro-batch": (
            balancing == "global_aux_loss"
        ),
        "aux_loss, over a microbatch, on the micro-batch": balancing == "aux_loss",
        "which tokens find an expert full, on TP, CP and the micro-batch": shape.moe_expert_capacity_factor > 0,
    }
    named = "; ".join(what for what, there in found.items() if there)
    return f"not the same in every layout, by definition (docs/layouts.md): {named}" if named else ""


def weigh_losses(config: TransformerConfig, optimizer: MegatronOptimizer, tokens_per_microbatch: int) -> None:
    """Divide gradients by the exact token count, and run the backward pass on losses the size of a mean all the same.

    Megatron backpropagates each microbatch's *sum* of losses and divides at the end, which overflows fp16 at a scale
    that shrinks with the sequence. A power of two is taken off before and given back after: exact in every format. The
    division is ours, since Megatron's takes a count below 1 for 1, as a small count without that power is.
    """
    shrink = float(1 << (tokens_per_microbatch.bit_length() - 1))
    finalize = config.finalize_model_grads_func

    def finalize_and_divide(model: list[Chunk], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
        finalize(model, None, **kwargs)
        if num_tokens is not None:
            for chunk in model:
                chunk.scale_gradients(shrink / token_counts(config).counted)

    config.grad_scale_func = lambda loss: optimizer.scale_loss(loss) / shrink
    config.moe_grad_scale_func = lambda: optimizer.scale_loss(token_counts(config).share) / shrink
    config.finalize_model_grads_func = finalize_and_divide
