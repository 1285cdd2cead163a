"""Llama 4, its text model."""

import dataclasses
from typing import Any

from models.families.base import llama, tiny
from models.shapes import GPTShape


def _llama4(num_moe_experts: int, **changes: Any) -> GPTShape:
    """Chunks of 8,192 tokens in blocks with RoPE; every fourth goes without and sees everything, with queries that
    grow; one expert a token, by a sigmoid that multiplies what it reads, beside a shared one.

    Source: https://github.com/meta-llama/llama-models (models/llama4), and the text_config of each config.json.
    """
    settings: dict[str, Any] = {
        "vocab_size": 202_048,
        "rotary_base": 500_000,
        "rotary_interleaved": True,
        "no_rope_freq": "4",
        "attention_chunk_size": 8192,
        "attn_scale": 0.1,
        "floor_scale": 8192,
        "num_moe_experts": num_moe_experts,
        "moe_ffn_hidden_size": 8192,
        "moe_shared_expert_intermediate_size": 8192,
        "moe_router_topk": 1,
        "moe_router_score_function": "sigmoid",
        "moe_apply_probs_on_input": True,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-3,
    }
    shape = llama(48, 5120, 16384, num_attention_heads=40, num_query_groups=8)
    return dataclasses.replace(shape, **settings | changes)


PUBLISHED: dict[str, GPTShape] = {
    # https://huggingface.co/meta-llama/Llama-4-Scout-17B-16E and Llama-4-Maverick-17B-128E
    "llama4_scout": _llama4(
        16,
        qk_l2_norm=True,
        rope_scaling="llama3",
        rope_scaling_factor=16.0,
        rope_low_freq_factor=1.0,
        rope_high_freq_factor=1.0,
        rope_original_max_position_embeddings=8192,
        max_position_embeddings=10_485_760,
    ),
    "llama4_maverick": _llama4(128, moe_layer_freq="[0,1]*24", max_position_embeddings=1_048_576),
}

TINY: dict[str, GPTShape] = {
    "llama4_tiny": tiny(
        PUBLISHED["llama4_scout"],
        rope_original_max_position_embeddings=64,
        attention_chunk_size=24,
        floor_scale=8,
        num_moe_experts=4,
        moe_ffn_hidden_size=48,
        moe_shared_expert_intermediate_size=48,
    ),
}
