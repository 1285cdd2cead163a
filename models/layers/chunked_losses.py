"""The loss of a few tokens at a time, so that the logits of a whole sample are never there.

Logits of s tokens take s x V / TP elements, and fp32 copies for the softmax: at a vocabulary of 262,144 more than the
blocks. Here the output layer and the loss run over pieces of the sequence, and once more, piece by piece, in the
backward pass, as Liger (arXiv:2410.10989) and torchtitan do. It costs the output layer's product a third time, and an
fp32 gradient of its weight while that is added up.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

Losses = Callable[[Tensor, Tensor], Tensor]
"""(labels [b, s], logits [s, b, v / tp]) -> [..., b, s]."""


def install(chunk: HybridModel, tokens: int) -> None:
    """Where a chunk has the output layer, it returns losses in place of logits whenever there are labels.

    tokens: of a piece, over all samples of a microbatch. Whatever else changes the output layer's logits has been
    installed before.
    """
    if not hasattr(chunk, "output_layer"):
        return
    head = ChunkedHead(chunk.output_layer, chunk.compute_language_model_loss, tokens)
    chunk.output_layer.forward = head
    chunk.compute_language_model_loss = head.passed_on

    def take(_chunk: object, _args: object, kwargs: dict[str, Any]) -> None:
        head.labels = kwargs.get("labels")

    chunk.register_forward_pre_hook(take, with_kwargs=True)


def chunked_head(output_layer: Any) -> "ChunkedHead | None":
    """What ``install`` has made of an output layer."""
    head = getattr(output_layer, "forward", None)
    return head if isinstance(head, ChunkedHead) else None


class ChunkedHead:
    """The forward function of an output layer."""

    def __init__(self, layer: ColumnParallelLinear, losses: Losses, tokens: int) -> None:
        self.layer, self.logits, self.losses, self.tokens = layer, layer.forward, losses, tokens
        self.labels: Tensor | None = None
        """Of this forward pass, [b, s]; None: logits are wanted."""

    def losses_of(self, hidden: Tensor, weight: Tensor | None, labels: Tensor, losses: Losses) -> Tensor:
        """Of another pass through the output layer, as each depth of multi-token prediction makes one."""
        before = self.labels, self.losses
        self.labels, self.losses = labels, losses
        try:
            return self.layer(hidden, weight=weight)[0]
        finally:
            self.labels, self.losses = before

    def __call__(self, hidden: Tensor, weight: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, None]:
        """hidden [s (/tp), b, h] -> losses [..., b, s]; without labels what it was: logits [s, b, v / tp]."""
        labels, self.labels = self.labels, None
        if labels is None:
            return self.logits(hidden, weight=weight, **kwargs)
        layer = self.layer
        if layer.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, True, group=layer.tp_group)
        elif layer.allreduce_dgrad:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=layer.tp_group)
        rows = max(1, self.tokens // hidden.shape[1])
        piece = partial(self._piece, self.losses)
        return _InPieces.apply(hidden, layer.weight if weight is None else weight, labels, piece, rows), None

    def passed_on(self, labels: Tensor, outputs: Tensor) -> Tensor:
        """In place of the chunk's loss, which the output layer has made already."""
        return outputs

    def _piece(self, losses: Losses, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """[..., b, rows]. mcore would gather and reduce for each piece, unless its caller does ("expert_comm")."""
        layer = self.layer
        before, layer.explicit_expert_comm = layer.explicit_expert_comm, True
        try:
            logits, _ = self.logits(hidden, weight=weight)
        finally:
            layer.explicit_expert_comm = before
        return losses(labels, logits)


class _InPieces(torch.autograd.Function):
    """Pieces of the sequence one after the other; in the backward pass each is computed again, and its graph freed."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, piece: Callable[..., Tensor], rows: int
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, labels)
        ctx.piece, ctx.rows = piece, rows
        found = [piece(hidden[at], weight, labels[:, at]) for at in _pieces(hidden, rows)]
        return torch.cat(found, dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        hidden, weight, labels = ctx.saved_tensors
        found, total = torch.empty_like(hidden), None
        for at in _pieces(hidden, ctx.rows):
            with torch.enable_grad():
                part = hidden[at].detach().requires_grad_()
                losses = ctx.piece(part, weight, labels[:, at])
            wanted = (part, weight) if ctx.needs_input_grad[1] else (part,)
            found[at], *of_weight = torch.autograd.grad(losses, wanted, gradient[..., at])
            if of_weight:
                total = _added(total, of_weight.pop(), weight)  # the list would keep it beside the next one
        return found, None if total is None else total.to(weight.dtype), None, None, None


def _pieces(hidden: Tensor, rows: int) -> Iterator[slice]:
    return (slice(at, min(at + rows, len(hidden))) for at in range(0, len(hidden), rows))


def _added(total: Tensor | None, one: Tensor, weight: Tensor) -> Tensor:
    """In fp32: sums of many pieces in 16 bits would lose what a single product keeps. Where the product itself adds to
    the main gradient (models/layers/wgrad.py), ``one`` is a stand-in, and the last will do."""
    if getattr(weight, "grad_added_to_main_grad", False) and not getattr(weight, "zero_out_wgrad", False):
        return one
    return one.float() if total is None else total.add_(one)
