"""Cross entropy over a vocabulary that is split over TP: each token's loss, in fp32.

On GPUs by Transformer Engine's kernel, where a start has compared it with the plain one (``disproof``).
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import Tensor

TokenLoss = Callable[..., Tensor]
"""(losses, log_z, batch) -> losses, all fp32 [b, s/cp]: a user's own loss of each token, from its cross entropy
``losses`` and ``log_z``, the logarithm of the sum of the exponentials of its logits."""
Kernel = Callable[[Tensor, Tensor, dist.ProcessGroup], Tensor]
"""(logits [s, b, v / tp], which it may overwrite, labels [s, b], TP's group) -> losses, fp32 [s, b]."""
ROWS = 16
"""Tokens that a start compares."""
LOSSES_OFF, GRADIENTS_WORSE = 1e-5, 4.0
"""Of the largest loss; and how many times the kernel's error against fp32 logits may be the plain one's in bf16."""


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
    losses = (_engines if fused else _plain)(logits, labels.transpose(0, 1).contiguous(), group)
    return losses.transpose(0, 1).contiguous()


def _engines(logits: Tensor, labels: Tensor, group: dist.ProcessGroup) -> Tensor:
    from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

    losses: Tensor = parallel_cross_entropy(logits, labels, dist_process_group=group, overwrite_input=True)
    return losses


def _plain(logits: Tensor, labels: Tensor, group: dist.ProcessGroup) -> Tensor:
    losses: Tensor = _CrossEntropy.apply(logits, labels, group, False)
    return losses


@lru_cache
def disproof(group: dist.ProcessGroup, columns: int, device: torch.device, kernel: Kernel = _engines) -> str:
    """What the kernel gets wrong, on any rank, of losses and gradients of a few bf16 rows; "" where nothing. Collective
    over all ranks. Draws from its own generator; the kernel is compiled for it, as its first use would.

    group, columns: TP's, and a rank's part of the vocabulary.
    """
    own, common = (torch.Generator().manual_seed(seed) for seed in (group.rank(), group.size()))
    part = (3 * torch.randn(ROWS, 1, columns, generator=own)).to(device, torch.bfloat16)
    labels = (torch.arange(ROWS, device=device) * (columns * group.size() - 1) // (ROWS - 1)).unsqueeze(1)
    weights = torch.rand(ROWS, 1, generator=common).to(device)
    plain, exact = (_with_gradient(_plain, logits, labels, weights, group) for logits in (part, part.float()))
    try:
        why = _differs(_with_gradient(kernel, part, labels, weights, group), plain, exact)
    except Exception as error:  # whatever Triton's compiler raises
        why = f"the kernel failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    failed = torch.tensor([bool(why)], dtype=torch.int32, device=device)
    dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    return why or ("it is not equal on another rank" if failed.item() else "")


LossesAndGradient = tuple[Tensor, Tensor]


def _with_gradient(
    compute: Kernel, logits: Tensor, labels: Tensor, weights: Tensor, group: dist.ProcessGroup
) -> LossesAndGradient:
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        losses = compute(leaf * 1, labels, group)  # which is overwritten
        return losses.detach(), torch.autograd.grad(losses, leaf, weights)[0].float()


def _differs(found: LossesAndGradient, plain: LossesAndGradient, exact: LossesAndGradient) -> str:
    off = (found[0] - exact[0]).abs().max().item()
    if not off <= LOSSES_OFF * exact[0].abs().max().item():  # NaN is no less than anything
        return f"the kernel's losses are off by {off:.2g}"
    mine, usual = ((one[1] - exact[1]).abs().max().item() for one in (found, plain))
    if not mine <= GRADIENTS_WORSE * usual:
        return f"the kernel's gradients are off by {mine:.2g}, those of the plain one by {usual:.2g}"
    return ""


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
