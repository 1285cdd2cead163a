"""Qwen3.5 (text): Qwen3-Next's blocks, with a dense MLP in the smaller models and experts in the larger ones."""

import dataclasses

from models.families.base import llama, tiny
from models.shapes import GPTShape


def _qwen35(
    num_layers: int,
    hidden_size: int,
    ffn_hidden_size: int,
    heads: tuple[int, int],
    linear_num_value_heads: int,
    tied: bool = False,
) -> GPTShape:
    """heads: of attention, its queries' and keys'.

    Source: transformers 5.23's Qwen3_5TextConfig and Qwen3_5MoeTextConfig, whose defaults are the 9B and the 35B-A3B
    (full_attention_interval 4, partial_rotary_factor 0.25, 16 key heads). rope_theta and max_position_embeddings are
    those of the published config.json files' text_config. Their depth of multi-token prediction is left out.
    """
    return dataclasses.replace(
        llama(num_layers, hidden_size, ffn_hidden_size, *heads),
        kv_channels=256,
        vocab_size=248_320,
        norm_epsilon=1e-6,
        layernorm_zero_centered_gamma=True,
        qk_layernorm=True,
        attention_output_gate=True,
        linear_attention_freq="4",
        linear_num_value_heads=linear_num_value_heads,
        rotary_base=10_000_000,
        rotary_percent=0.25,
        max_position_embeddings=262_144,
        untie_embeddings_and_output_weights=not tied,
        hf_model_type="qwen3_5_text",
    )


def _qwen35_moe(num_layers: int, hidden_size: int, num_moe_experts: int) -> GPTShape:
    """Experts in every block, beside a shared one with a gate."""
    return dataclasses.replace(
        _qwen35(num_layers, hidden_size, 512, (16, 2), 32),
        num_moe_experts=num_moe_experts,
        moe_ffn_hidden_size=512,
        moe_router_topk=8,
        moe_shared_expert_intermediate_size=512,
        moe_shared_expert_gate=True,
        moe_router_load_balancing_type="global_aux_loss",
        moe_aux_loss_coeff=1e-3,
        hf_model_type="qwen3_5_moe_text",
    )


PUBLISHED: dict[str, GPTShape] = {
    # https://huggingface.co/Qwen/Qwen3.5-0.8B (sizes as in slime's scripts/models) and -4B
    "qwen35_0_8b": _qwen35(24, 1024, 3584, (8, 2), 16, tied=True),
    "qwen35_4b": _qwen35(32, 2560, 9216, (16, 4), 32, tied=True),
    # https://huggingface.co/Qwen/Qwen3.5-9B, -27B (sizes as in Megatron-Bridge's tests of its qwen35_vl_bridge), and
    # -35B-A3B: their text models
    "qwen35_9b": _qwen35(32, 4096, 12288, (16, 4), 32),
    "qwen35_27b": _qwen35(64, 5120, 17408, (24, 4), 48),
    "qwen35_35b_a3b": _qwen35_moe(40, 2048, 256),
}

_TINY_HEADS = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}

TINY: dict[str, GPTShape] = {
    "qwen35_tiny": tiny(PUBLISHED["qwen35_9b"], **_TINY_HEADS),
    "qwen35_moe_tiny": tiny(
        PUBLISHED["qwen35_35b_a3b"],
        **_TINY_HEADS,
        num_moe_experts=4,
        moe_ffn_hidden_size=64,
        moe_router_topk=2,
        moe_shared_expert_intermediate_size=64,
    ),
}
