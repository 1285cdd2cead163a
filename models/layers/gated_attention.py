"""Attention whose output passes a gate."""

import torch
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor


class GatedSelfAttention(SelfAttention):
    """mcore's with ``attention_output_gate``, which it would compile as it is first used; here it is not."""

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """x [s, b, n d], gate [s, b, n, d] -> x's shape."""
        return (x * torch.sigmoid(gate.reshape(x.shape).float())).to(x.dtype)
