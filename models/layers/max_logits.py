"""The largest attention logit of each head, as megatron-core's modules with Transformer Engine collect it.

For QK-clip (training/qk_clip.py). Costs the products of queries and keys once more, in fp32, a block of queries at a
time. Transformer Engine's kernels, but for FlashAttention's, return it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from models.layers.blockwise_attention import AttentionMask

COLLECTED = "current_max_attn_logits"
"""A core attention's [heads / TP], of all forward passes in training since it was set to None: fp32 where our attention
collects, else in the dtype of Transformer Engine's output (steps of 0.5 at 100 in bf16). megatron-core's name; modules
without it collect nothing."""


@torch.no_grad()
def collect(
    attention: nn.Module, query: Tensor, key: Tensor, sight: AttentionMask, scale: float | None, pieces: Sequence[int]
) -> None:
    """Of one forward pass. All as ``attend_in_blocks`` has it."""
    holder: Any = attention
    found, before = largest_logits(query, key, sight, scale, pieces), holder.current_max_attn_logits
    holder.current_max_attn_logits = found if before is None else torch.maximum(before, found)


def largest_logits(
    query: Tensor, key: Tensor, sight: AttentionMask, scale: float | None = None, pieces: Sequence[int] = (0,)
) -> Tensor:
    """query [s, b, n, d], key [t, b, g, d] -> fp32 [n], over all pairs of which the query sees the key."""
    heads, groups = query.shape[2], key.shape[2]
    largest = query.new_full((heads,), -torch.inf, dtype=torch.float32)
    for block in sight.blocks(pieces, len(query) // len(pieces)):
        q = query[block.rows].float().permute(1, 2, 0, 3).unflatten(1, (groups, -1))
        k = key[block.keys].float().permute(1, 2, 3, 0)
        logits = (q.flatten(2, 3) @ k).view(*q.shape[:4], -1).flatten(1, 2)  # no copy of a key for each of its heads
        unseen = ~sight.mask(block, query.device)
        largest = torch.maximum(largest, logits.masked_fill_(unseen, -torch.inf).amax((0, 2, 3)))
    return largest * (query.shape[-1] ** -0.5 if scale is None else scale)
