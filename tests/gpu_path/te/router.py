"""The router of experts: scores, choice and weights, and the loss that balances its load, each with its gradient.

logits: [tokens, experts]. What a forward keeps for its backward is the softmax, or the sigmoid, in fp32.
"""

from typing import Any

import torch
from torch import Tensor

from tests.gpu_path.te.kernels import kernel

TINY = 1e-20


def _chosen(scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None) -> Tensor:
    """bool [tokens, experts]. Groups are rated by the sum of their topk / group_topk best experts."""
    if group_topk:
        assert num_groups
        groups = scores.unflatten(-1, (num_groups, -1))
        rated = groups.topk(topk // group_topk, -1).values.sum(-1)
        kept = torch.zeros_like(rated, dtype=torch.bool).scatter(-1, rated.topk(group_topk, -1).indices, True)
        scores = groups.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(topk, -1).indices, True)


def _softmax_backward(y: Tensor, grad: Tensor) -> Tensor:
    return y * (grad - (grad * y).sum(-1, keepdim=True))


def _normalised_backward(y: Tensor, chosen: Tensor, grad: Tensor) -> Tensor:
    """Of y / sum of the chosen y."""
    total = (y * chosen).sum(-1, keepdim=True) + TINY
    return chosen * (grad - (grad * y * chosen).sum(-1, keepdim=True) / total) / total


@kernel
def fused_topk_with_score_function_fwd(
    logits: Tensor, topk: int, use_pre_softmax: bool, num_groups: int | None, group_topk: int | None,
    scaling_factor: float | None, score_function: str, expert_bias: Tensor | None, routing_map_format: int = 0,
    topk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(weights, map, what is kept)."""
    if routing_map_format or topk_indices is not None:
        raise NotImplementedError("bitmaps and dense indices of routing are not emulated")
    values = logits.float()
    if score_function == "sigmoid":
        kept = values.sigmoid()
        rated = kept if expert_bias is None else kept + expert_bias
        chosen = _chosen(rated, topk, num_groups, group_topk)
        weights = kept * chosen
        weights = weights / (weights.sum(-1, keepdim=True) + TINY) if topk > 1 else weights
    elif use_pre_softmax:
        kept = values.softmax(-1)
        chosen = _chosen(kept, topk, num_groups, group_topk)
        weights = kept * chosen
    else:
        chosen = _chosen(values, topk, num_groups, group_topk)
        weights = kept = values.masked_fill(~chosen, float("-inf")).softmax(-1)
    return (weights * (scaling_factor or 1.0)).to(logits.dtype), chosen, kept


@kernel
def fused_topk_with_score_function_bwd(
    routing_map: Tensor, intermediate_output: Tensor, grad_probs: Tensor, grad_logits: Tensor, topk: int,
    use_pre_softmax: bool, scaling_factor: float | None, score_function: str, use_dense_indices: bool = False,
    routing_map_format: int = 0,
) -> None:  # fmt: skip
    grad, kept = grad_probs.float() * routing_map * (scaling_factor or 1.0), intermediate_output
    if score_function == "sigmoid":
        grad = _normalised_backward(kept, routing_map, grad) if topk > 1 else grad
        grad_logits.copy_(grad * kept * (1 - kept))
    else:
        grad_logits.copy_(_softmax_backward(kept, grad))


@kernel
def fused_score_for_moe_aux_loss_fwd(
    logits: Tensor, topk: int, score_function: str, routing_map_format: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """(scores, map, what is kept)."""
    kept = logits.float().sigmoid() if score_function == "sigmoid" else logits.float().softmax(-1)
    scores = kept / (kept.sum(-1, keepdim=True) + TINY) if score_function == "sigmoid" else kept
    return scores, _chosen(scores, topk, None, None), kept


@kernel
def fused_score_for_moe_aux_loss_bwd(
    intermediate_output: Tensor, grad_scores: Tensor, grad_logits: Tensor, topk: int, score_function: str
) -> None:
    kept = intermediate_output
    if score_function == "sigmoid":
        grad = _normalised_backward(kept, torch.ones_like(kept), grad_scores.float())
        grad_logits.copy_(grad * kept * (1 - kept))
    else:
        grad_logits.copy_(_softmax_backward(kept, grad_scores.float()))


@kernel
def fused_moe_aux_loss_fwd(
    probs: Tensor, tokens_per_expert: Tensor, total_num_tokens: int, num_experts: int, num_rows: int, num_cols: int,
    topk: int, coeff: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(loss, its factor)."""
    factor = torch.full((), num_experts * coeff / topk / total_num_tokens**2, device=probs.device)
    return (factor * (probs.float().sum(0) * tokens_per_expert).sum()).to(probs.dtype), factor


@kernel
def fused_moe_aux_loss_bwd(
    Const_buf: Tensor, tokens_per_expert: Tensor, num_rows: int, num_cols: int, grad_aux_loss: Tensor
) -> Any:
    """Of the scores [tokens, experts]."""
    each = (Const_buf * grad_aux_loss.float() * tokens_per_expert).to(grad_aux_loss.dtype)
    return each.expand(num_rows, num_cols).contiguous()
