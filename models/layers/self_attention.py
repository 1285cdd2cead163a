"""mcore's self-attention, with a norm over all heads and rotary frequencies of its own where the model says so."""

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn

from models.layers.chunked import goes_without_rope
from models.layers.whole_matrices import SplitOverTP
from models.rope import attention_factor
from models.shapes import GPTShape


class BlockAttention(SelfAttention):
    """Of one block of ``shape``."""

    def __init__(self, config: TransformerConfig, *args: Any, shape: GPTShape, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if shape.qk_layernorm and shape.qk_layernorm_full_width:
            self.q_layernorm: nn.Module = AllHeadsNorm(config, self.num_attention_heads_per_partition, self.tp_group)
            self.k_layernorm: nn.Module = AllHeadsNorm(config, self.num_query_groups_per_partition, self.tp_group)
        if shape.qk_l2_norm and not goes_without_rope(config, self.layer_number):
            assert config.kv_channels is not None  # turning changes no length, so that this may come before it
            norm: Any = nn.RMSNorm(config.kv_channels, config.layernorm_epsilon, elementwise_affine=False)
            self.q_layernorm = self.k_layernorm = norm
        self.clip_qkv = shape.clip_qkv
        self._yarn_concentration_factor = attention_factor(shape)
        self.rotary_part: int | None = None
        """Which half of the rotary embedding this block's is (models/rope.py); None: all of it."""
        if shape.has_local_rope:
            windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, self.layer_number)
            self.rotary_part = int(windowed)
            if windowed:
                self._yarn_concentration_factor = 1.0

    def forward(self, *args: Any, rotary_pos_emb: Any = None, **kwargs: Any) -> Any:
        """mcore's, with this block's part of the rotary embedding."""
        if self.rotary_part is not None and rotary_pos_emb is not None:
            rotary_pos_emb = part_of(rotary_pos_emb, self.rotary_part, self.config.rotary_interleaved)
        return super().forward(*args, rotary_pos_emb=rotary_pos_emb, **kwargs)

    def get_query_key_value_tensors(self, *args: Any, split_qkv: bool = True, **kwargs: Any) -> Any:
        """mcore's, clipped: queries, keys, values, each [s, b, heads, d], and with an output gate that, as it is."""
        found = super().get_query_key_value_tensors(*args, split_qkv=split_qkv or bool(self.clip_qkv), **kwargs)
        if not self.clip_qkv:
            return found
        return *(each.clamp(-self.clip_qkv, self.clip_qkv) for each in found[:3]), *found[3:]

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """x [s, b, n d], gate [s, b, n, d] -> x's shape. mcore's is compiled as it is first used; this is not."""
        return (x * torch.sigmoid(gate.reshape(x.shape).float())).to(x.dtype)


def part_of(embedding: Tensor, part: int, interleaved: bool) -> Tensor:
    """Of the angles of whole-sequence and of windowed blocks, [..., 2 d], side by side in each copy of both: one part,
    [..., d]. mcore has two copies of all frequencies one after the other, or each frequency twice."""
    copies = (embedding,) if interleaved else embedding.chunk(2, dim=-1)
    return torch.cat([copy.chunk(2, dim=-1)[part] for copy in copies], dim=-1)


class AllHeadsNorm(SplitOverTP):
    """RMSNorm over the channels of all heads together, whose heads and weights are split over TP.

    Not by mcore's field qk_layernorm, with which gradients of a q_layernorm are summed over TP: each rank has other
    weights here.
    """

    split: ClassVar = {"weight": 0}

    def __init__(self, config: TransformerConfig, heads: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        assert config.kv_channels is not None
        self.tp_group, self.eps = group, config.layernorm_epsilon
        self.width = heads * config.kv_channels * group.size()
        self.offset = float(config.layernorm_zero_centered_gamma)
        self.weight = nn.Parameter(torch.ones(heads * config.kv_channels, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, heads / tp, d] -> the same shape; computed in fp32."""
        flat = x.flatten(2).float()
        squares = _SumOverTP.apply(flat.square().sum(-1, keepdim=True), self.tp_group)
        normed = flat * torch.rsqrt(squares / self.width + self.eps) * (self.weight.float() + self.offset)
        return normed.type_as(x).view_as(x)


class _SumOverTP(torch.autograd.Function):
    """The sum of all ranks' numbers, each of which every rank's output depends on: backward sums the gradients."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _summed(own, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.group), None


def _summed(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    if group.size() == 1:
        return own
    total = own.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total
