"""Sublayers: mcore's HybridModel makes two layers of each block, or one of each letter of a pattern. Only this file
translates."""

import itertools
from collections.abc import Sequence
from typing import Literal

from models.shapes import GPTShape
from parallel.config import PrecisionConfig

OffloadModule = Literal["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"]
"""Parts of a block whose activations train.offload_modules sends to the host, in Megatron's words."""


def sublayers_per_block(shape: GPTShape) -> int:
    """Attention ("*", latent "+") and MLP ("-", experts "E") are two layers to HybridModel, a pattern's letter one."""
    return 1 if shape.hybrid_layer_pattern else 2


def hybrid_layer_pattern(shape: GPTShape, layers_per_chunk: Sequence[int]) -> str:
    """HybridModel's pattern: one symbol per sublayer, "|" between pipeline chunks, then "/" before each MTP depth.

    layers_per_chunk: blocks of each chunk, in the order activations pass through them; 0 is allowed.
    """
    if sum(layers_per_chunk) != shape.num_layers:
        raise ValueError(f"{list(layers_per_chunk)} blocks per chunk do not sum to {shape.num_layers} layers")
    blocks = shape.blocks
    ends = list(itertools.accumulate(layers_per_chunk))
    chunks = ["".join(blocks[end - count : end]) for end, count in zip(ends, layers_per_chunk, strict=True)]
    return "|".join(chunks) + ("/" + mtp_symbols(shape)) * shape.mtp_num_layers


def mtp_symbols(shape: GPTShape) -> str:
    """Of the block within an MTP depth: one like the last of the model, as DeepSeek-V3 has it (arXiv:2412.19437)."""
    return shape.blocks[-1]


def num_sublayers(shape: GPTShape) -> int:
    """What HybridModel wants as ``num_layers``."""
    return sublayers_per_block(shape) * shape.num_layers


def recompute_num_sublayers(shape: GPTShape, recompute_num_layers: int) -> int:
    """mcore's ``recompute_num_layers`` for that many of our blocks, of either recompute method."""
    return sublayers_per_block(shape) * recompute_num_layers


def bf16_sublayers(shape: GPTShape, precision: PrecisionConfig) -> dict[str, bool | int]:
    """mcore's fields for the first and last blocks that stay in bf16 under fp8 or fp4."""
    if not precision.first_last_layers_bf16:
        return {}
    each = sublayers_per_block(shape)
    return {
        "first_last_layers_bf16": True,
        "num_layers_at_start_in_bf16": each * precision.num_layers_at_start_in_bf16,
        "num_layers_at_end_in_bf16": each * precision.num_layers_at_end_in_bf16,
    }


def block_of(shape: GPTShape, layer_number: int) -> tuple[int, str]:
    """Our block and the symbol for mcore's global ``layer_number``, which counts sublayers from 1."""
    block, part = divmod(layer_number - 1, sublayers_per_block(shape))
    return block, shape.blocks[block][part]


def per_sublayer(shape: GPTShape, per_block: Sequence[int | bool]) -> list[int]:
    """A per-block list (no_rope_freq, window_attn_skip_freq) as mcore reads it: by sublayer.

    Never give mcore an integer frequency instead: it would count sublayers and hit every attention or none.
    """
    return [int(value) for value in per_block for _ in range(sublayers_per_block(shape))]
