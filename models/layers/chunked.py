"""Llama-4's attention: in blocks with RoPE a query sees its own chunk of the sequence only, and queries and keys are
normed without weights; in those without RoPE, which see everything, queries grow with their position. In Ministral 3
they grow in every block.

mcore has no fields for it; ``transformer_config`` sets these beside its own, and every module finds them there.
"""

from typing import NamedTuple

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor


class Temperature(NamedTuple):
    """Queries at position p are multiplied by 1 + scale ln(1 + floor((p + first) / floor)) (arXiv:2501.19399)."""

    scale: float
    floor: int
    first: int
    """1 in Llama-4, 0 in Ministral 3."""

    def apply(self, query: Tensor, positions: Tensor) -> Tensor:
        """query [s, b, n, d]; positions [s, 1 or b], within their document."""
        factor = torch.log1p(torch.floor((positions.float() + self.first) / self.floor)) * self.scale + 1.0
        return (query * factor[..., None, None]).to(query.dtype)


def chunk_of(config: TransformerConfig, layer_number: int) -> int | None:
    """Tokens of a chunk; None: this layer has none."""
    chunk = int(getattr(config, "attention_chunk_size", 0))
    return chunk if chunk and not goes_without_rope(config, layer_number) else None


def temperature_of(config: TransformerConfig, layer_number: int) -> Temperature | None:
    """None: this layer's queries stay as they are."""
    scale, everywhere = float(getattr(config, "attn_scale", 0.0)), bool(getattr(config, "attn_scale_all_blocks", False))
    if not scale or not (everywhere or goes_without_rope(config, layer_number)):
        return None
    return Temperature(scale, config.floor_scale, first=0 if everywhere else 1)


def goes_without_rope(config: TransformerConfig, layer_number: int) -> bool:
    """layer_number: of mcore's sublayers, from 1."""
    return isinstance(config.no_rope_freq, list) and bool(config.no_rope_freq[layer_number - 1])
