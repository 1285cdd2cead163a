"""Cross entropy over a vocabulary that is split over TP: each token's loss, in fp32."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import Tensor

TokenLoss = Callable[..., Tensor]
"""(losses, log_z, batch) -> losses, all fp32 [b, s/cp]: a user's own loss of each token, from its cross entropy
``losses`` and ``log_z``, the logarithm of the sum of the exponentials of its logits."""


def install(chunk: HybridModel, fused: bool, own_loss: TokenLoss | None = None) -> None:
    """Let a chunk compute its losses here. fused: by Transformer Engine's kernel. own_loss: kept as the chunk's, for
    the training step, which calls it with the batch; the chunk then returns losses and log_z, [2, b, s/cp]."""
    group = chunk.pg_collection.tp
    chunk.own_loss = own_loss
    chunk.compute_language_model_loss = (
        partial(token_losses, group=group, fused=fused) if own_loss is None else LossesAndLogZ(group)
    )


class LossesAndLogZ:
    """(labels [b, s], logits [s, b, v / tp]) -> losses and log_z, fp32 [2, b, s]. The logits are overwritten."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.plain = partial(token_losses, group=group)
        """The losses alone: of depths of multi-token prediction."""

    def __call__(self, labels: Tensor, logits: Tensor) -> Tensor:
        both = _CrossEntropy.apply(logits, labels.transpose(0, 1).contiguous(), self.group, True)
        return torch.stack([one.transpose(0, 1) for one in both])


def token_losses(labels: Tensor, logits: Tensor, *, group: dist.ProcessGroup, fused: bool = False) -> Tensor:
    """fp32 [b, s]. labels [b, s]; logits [s, b, v / tp], which are overwritten."""
    labels = labels.transpose(0, 1).contiguous()
    if fused:
        from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

        losses = parallel_cross_entropy(logits, labels, dist_process_group=group, overwrite_input=True)
    else:
        losses = _CrossEntropy.apply(logits, labels, group, False)
    return losses.transpose(0, 1).contiguous()


class _CrossEntropy(torch.autograd.Function):
    """Megatron's has three all-reduces of each microbatch, with TP 1 too; here one all-gather, and none with TP 1."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup, with_log_z: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        total, target, softmax, own, top = _losses(logits, labels, group)
        ctx.save_for_backward(softmax, own)
        ctx.dtype = logits.dtype
        log_total = total.log()
        losses = log_total - target
        return (losses, log_total + top) if with_log_z else losses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, of_log_z: Tensor | None = None) -> tuple[Tensor, None, None, None]:
        """d loss / d logits is the softmax less 1 at the label; d log_z / d logits is the softmax."""
        softmax, own = ctx.saved_tensors
        at, here = own.clamp(min=0).unsqueeze(-1), (own >= 0).unsqueeze(-1)
        if of_log_z is None:
            softmax.scatter_add_(-1, at, -here.to(softmax.dtype))
            softmax.mul_(gradient.unsqueeze(-1))
        else:
            softmax.mul_((gradient + of_log_z).unsqueeze(-1))
            softmax.scatter_add_(-1, at, torch.where(here, -gradient.unsqueeze(-1), 0.0))
        return softmax.to(ctx.dtype), None, None, None


def _losses(logits: Tensor, labels: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Sum of exponentials and logit of the label, both less the largest logit, which comes last, all [s, b]. Between
    them this rank's part of the softmax, in fp32, in the memory of fp32 logits; and where each label is in that part,
    -1 in another rank's."""
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
        target, top = targets.sum(0) - highest, highest
    return total, target, scores.div_(total.unsqueeze(-1)), own, top


def _gathered(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[tp, *part.shape]."""
    whole = part.new_empty(group.size() * part.numel())
    dist.all_gather_into_tensor(whole, part.flatten(), group=group)
    return whole.view(group.size(), *part.shape)
