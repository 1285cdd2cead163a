"""Megatron's fused rotary embedding of latent attention in plain torch: in Triton's interpreter a training of a minute
takes ten. test_fusions.py compares the two.

Pairs are neighbours before the turn and half a head apart after it. cos and sin: [s, 1, 1, d].
"""

from typing import Any

import torch
from torch import Tensor


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = x[..., 0::2], x[..., 1::2]
    (cos_left, cos_right), (sin_left, sin_right) = cos.chunk(2, -1), sin.chunk(2, -1)
    return torch.cat([one * cos_left - other * sin_left, other * cos_right + one * sin_right], -1)


def for_q(t: Tensor, cos: Tensor, sin: Tensor, qk_head_dim: int, emb_dim: int, *_: Any) -> Tensor:
    """t: [s, b, heads, qk_head_dim + emb_dim]."""
    plain, turning = t.split([qk_head_dim, emb_dim], -1)
    return torch.cat([plain, _turned(turning, cos, sin)], -1)


def for_kv(
    kv: Tensor, k_pos_emb: Tensor, cos: Tensor, sin: Tensor, emb_dim: int, k_dim: int, v_dim: int, *_: Any
) -> tuple[Tensor, Tensor]:
    """kv: [s, b, heads, k_dim + v_dim]; k_pos_emb: [s, b, 1, emb_dim], one for all heads."""
    keys, values = kv.split([k_dim, v_dim], -1)
    turned = _turned(k_pos_emb, cos, sin).expand(*keys.shape[:-1], emb_dim)
    return torch.cat([keys, turned], -1), values.contiguous()
