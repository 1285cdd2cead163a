"""Cross entropy over a vocabulary that is split over TP: each token's loss, in fp32."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import Tensor


def install(chunk: HybridModel, fused: bool) -> None:
    """Let a chunk compute its losses here. fused: by Transformer Engine's kernel."""
    chunk.compute_language_model_loss = partial(token_losses, group=chunk.pg_collection.tp, fused=fused)


def token_losses(labels: Tensor, logits: Tensor, *, group: dist.ProcessGroup, fused: bool = False) -> Tensor:
    """fp32 [b, s]. labels [b, s]; logits [s, b, v / tp], which are overwritten."""
    labels = labels.transpose(0, 1).contiguous()
    if fused:
        from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

        losses = parallel_cross_entropy(logits, labels, dist_process_group=group, overwrite_input=True)
    else:
        losses = _CrossEntropy.apply(logits, labels, group)
    return losses.transpose(0, 1).contiguous()


class _CrossEntropy(torch.autograd.Function):
    """Megatron's has three all-reduces of each microbatch, with TP 1 too; here one all-gather, and none with TP 1."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup) -> Tensor:
        losses, softmax, own = _losses(logits, labels, group)
        ctx.save_for_backward(softmax, own)
        ctx.dtype = logits.dtype
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        softmax, own = ctx.saved_tensors
        at, here = own.clamp(min=0).unsqueeze(-1), (own >= 0).unsqueeze(-1)
        softmax.scatter_add_(-1, at, -here.to(softmax.dtype))
        return softmax.mul_(gradient.unsqueeze(-1)).to(ctx.dtype), None, None


def _losses(logits: Tensor, labels: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Losses [s, b]; this rank's part of the softmax, in fp32, in the memory of fp32 logits; and where each label is
    in that part, -1 in another rank's."""
    scores = logits.float()
    own = labels - group.rank() * scores.shape[-1]
    own = torch.where((own >= 0) & (own < scores.shape[-1]), own, -1)
    top = scores.amax(-1)
    scores -= top.unsqueeze(-1)
    target = scores.gather(-1, own.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    total = torch.exp(scores, out=scores).sum(-1)
    if group.size() > 1:
        parts = torch.stack([top, total, torch.where(own >= 0, target + top, 0.0)])
        tops, totals, targets = _gathered(parts, group).unbind(1)
        highest = tops.amax(0)
        scores *= torch.exp(top - highest).unsqueeze(-1)
        total = (totals * torch.exp(tops - highest)).sum(0)
        target = targets.sum(0) - highest
    return total.log() - target, scores.div_(total.unsqueeze(-1)), own


def _gathered(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[tp, *part.shape]."""
    whole = part.new_empty(group.size() * part.numel())
    dist.all_gather_into_tensor(whole, part.flatten(), group=group)
    return whole.view(group.size(), *part.shape)
