"""The norm of the whole model's gradient, as Megatron computes it, but without a wait for the device."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor


@torch.no_grad()
def squared_norms(optimizer: MegatronOptimizer, device: torch.device) -> Tensor:
    """fp32 [k] on this rank's device: ``norm`` of them is the gradient's L2 norm, the same on every rank.

    One number for each group of ranks that holds the parameters of a part of the optimizer (experts may have their
    own), summed over it. get_grad_norm_fp32 of megatron-core 0.19.2 reads the number from the device instead, and
    without Transformer Engine waits for the norm of each parameter.
    """
    parts: Sequence[MegatronOptimizer] = getattr(optimizer, "chained_optimizers", [optimizer])
    if len(parts) > 1 and optimizer.grads_states_parallel_group_is_shared():
        gradients = [gradient for part in parts for gradient in part.get_grads_for_grad_norm()]
        return _summed(gradients, parts[0], device)
    return torch.cat([_summed(part.get_grads_for_grad_norm(), part, device) for part in parts])


def norm(squares: Sequence[float]) -> float:
    """Of ``squared_norms``, read from the device: the roots are taken, and squared again, as Megatron does."""
    roots = [square**0.5 for square in squares]
    return roots[0] if len(roots) == 1 else math.sqrt(sum(root**2 for root in roots))


def _summed(gradients: Sequence[Tensor], part: MegatronOptimizer, device: torch.device) -> Tensor:
    """fp32 [1]."""
    square = torch.zeros(1, dtype=torch.float32, device=device)
    if gradients:
        norms = torch._foreach_norm(list(gradients), 2, torch.float32)
        square = (torch.linalg.vector_norm(torch.stack(norms)) ** 2.0).reshape(1)
    dist.all_reduce(square, group=part.get_grad_stats_parallel_group())
    return square
