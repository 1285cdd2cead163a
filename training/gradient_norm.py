"""The L2 norm of the whole model's gradient, as Megatron computes it, but without a wait for the device."""

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor


@torch.no_grad()
def gradient_norm(optimizer: MegatronOptimizer, device: torch.device) -> Tensor:
    """fp64 [1] on this rank's device, the same on every rank.

    get_grad_norm_fp32 of megatron-core 0.19.2 reads the sum over ranks from the device, and without Transformer Engine
    waits for the norm of each parameter. Parts of the optimizer whose ranks differ (experts) are summed apart.
    """
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    gradients = [part.get_grads_for_grad_norm() for part in parts]
    if len(parts) > 1 and optimizer.grads_states_parallel_group_is_shared():
        parts, gradients = parts[:1], [[gradient for part in gradients for gradient in part]]
    squares = [torch.zeros(1, dtype=torch.float32, device=device) for _ in parts]
    for square, part, found in zip(squares, parts, gradients, strict=True):
        if found:
            square += torch.linalg.vector_norm(torch.stack(torch._foreach_norm(found, 2, torch.float32))) ** 2.0
        dist.all_reduce(square, group=part.get_grad_stats_parallel_group())
    return torch.cat(squares).double().sum(0, keepdim=True).sqrt()
