"""Qwen3-Next: three gated delta nets for each gated attention, and many small experts."""

import dataclasses

from models.families.base import llama, tiny
from models.shapes import GPTShape


def _qwen3_next(num_layers: int, hidden_size: int, num_moe_experts: int) -> GPTShape:
    """Norms whose weights are differences from 1; RoPE on a quarter of each head; a shared expert with a gate.

    Source: the model card and config.json of https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct
    (full_attention_interval 4, partial_rotary_factor 0.25, norm_topk_prob true, router_aux_loss_coef 0.001).
    """
    return dataclasses.replace(
        llama(num_layers, hidden_size, 5120, num_attention_heads=16, num_query_groups=2),
        kv_channels=256,
        vocab_size=151936,
        norm_epsilon=1e-6,
        layernorm_zero_centered_gamma=True,
        qk_layernorm=True,
        attention_output_gate=True,
        linear_attention_freq="4",
        rotary_base=10_000_000,
        rotary_percent=0.25,
        max_position_embeddings=262_144,
        num_moe_experts=num_moe_experts,
        moe_ffn_hidden_size=512,
        moe_router_topk=10,
        moe_shared_expert_intermediate_size=512,
        moe_shared_expert_gate=True,
        moe_router_load_balancing_type="global_aux_loss",
        moe_aux_loss_coeff=1e-3,
    )


PUBLISHED: dict[str, GPTShape] = {
    # https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct. Its depth of multi-token prediction is left out.
    "qwen3_next_80b_a3b": _qwen3_next(48, 2048, 512),
}

TINY: dict[str, GPTShape] = {
    "qwen3_next_tiny": tiny(
        PUBLISHED["qwen3_next_80b_a3b"],
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_moe_experts=4,
        moe_ffn_hidden_size=64,
        moe_router_topk=2,
        moe_shared_expert_intermediate_size=64,
    ),
}
