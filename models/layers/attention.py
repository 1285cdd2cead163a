"""Attention on torch's ``scaled_dot_product_attention``, for CPU and for CUDA without Transformer Engine.

Shape letters: s sequence, b microbatch, n query heads / TP, g key-value groups / TP, d head width, cp context ranks.
"""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from parallel.errors import SharedMistake


def check_supported(config: TransformerConfig) -> None:
    """Raises SharedMistake for what only Transformer Engine's attention does: ignoring it would be silently wrong."""
    found = {
        "softmax_type": config.softmax_type != "vanilla",
        "apply_query_key_layer_scaling": config.apply_query_key_layer_scaling,
        "window_size": config.window_size is not None,
    }
    for name in (name for name, used in found.items() if used):
        raise SharedMistake(f"model.megatron: {name} needs Transformer Engine's attention, which is not used here.")


class SDPAttention(MegatronModule):
    """Causal core attention: what mcore puts between the QKV and the output projection.

    Context parallelism gathers keys and values of the whole sequence: simple, exact, and cheap with few KV groups.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: object,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: object,
    ) -> None:
        super().__init__(config=config)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softmax_scale = softmax_scale
        self.cp_group = pg_collection.cp if pg_collection and config.context_parallel_size > 1 else None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
        """query [s/cp, b, n, d], key and value [s/cp, b, g, d] -> [s/cp, b, n * d], in the input's dtype."""
        dropout = self.dropout if self.training else 0.0
        # Heads differ over TP, so must their dropout. Under sequence parallelism the whole stack is in this region.
        own_rng = dropout > 0 and not self.config.sequence_parallel
        with get_cuda_rng_tracker().fork() if own_rng else contextlib.nullcontext():
            if self.cp_group is None:
                out = _attend(query, key, value, dropout, self.softmax_scale)
            else:
                out = self._attend_over_context(query, key, value, dropout)
        s, b = query.shape[:2]
        return out.permute(2, 0, 1, 3).reshape(s, b, -1)

    def _attend_over_context(self, query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        """This rank's two zigzag pieces (pieces r and 2 cp - 1 - r of 2 cp) against all keys that come before them."""
        assert self.cp_group is not None
        cp, rank = self.cp_group.size(), self.cp_group.rank()
        keys, values = GatherZigzag.apply(key, self.cp_group), GatherZigzag.apply(value, self.cp_group)
        half = query.shape[0] // 2
        pieces = []
        for part, position in ((0, rank), (1, 2 * cp - 1 - rank)):
            end = (position + 1) * half
            mask = torch.ones(half, end, dtype=torch.bool, device=query.device).tril(end - half)
            piece = query[part * half : (part + 1) * half]
            pieces.append(_attend(piece, keys[:end], values[:end], dropout, self.softmax_scale, mask))
        return torch.cat(pieces, dim=2)

    def sharded_state_dict(self, *_: object, **__: object) -> dict[str, object]:
        """It has no parameters; nor does it leave an ``_extra_state`` entry, unlike Transformer Engine's."""
        return {}


def _attend(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, scale: float | None, mask: Tensor | None = None
) -> Tensor:
    """[s, b, n, d] and [t, b, g, d] twice -> [b, n, s, d]; causal unless a mask [s, t] says more."""
    q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        dropout_p=dropout,
        scale=scale,
        enable_gqa=query.shape[2] != key.shape[2],
    )


class GatherZigzag(torch.autograd.Function):
    """Zigzag pieces [s/cp, ...] of all context ranks -> [s, ...] in natural order; backward reduce-scatters."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, cp = group, group.size()
        half = local.shape[0] // 2
        gathered = local.new_empty((cp, 2, half, *local.shape[1:]))
        dist.all_gather_into_tensor(gathered.view(cp * 2 * half, *local.shape[1:]), local.contiguous(), group=group)
        return torch.cat([gathered[:, 0].flatten(0, 1), gathered[:, 1].flip(0).flatten(0, 1)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        cp = ctx.group.size()
        half, rest = grad.shape[0] // (2 * cp), grad.shape[1:]
        first, second = grad[: cp * half].view(cp, half, *rest), grad[cp * half :].view(cp, half, *rest).flip(0)
        pieces = torch.stack([first, second], dim=1).reshape(cp * 2 * half, *rest)
        local = grad.new_empty((2 * half, *rest))
        dist.reduce_scatter_tensor(local, pieces, group=ctx.group)
        return local, None
