"""gpt-oss."""

import dataclasses
from typing import Any

from models.families.base import llama, tiny
from models.shapes import GPTShape


def _gpt_oss(num_layers: int, num_moe_experts: int) -> GPTShape:
    """Biases everywhere, a learned logit in each head's softmax, every other block windowed, a clamped SwiGLU.

    Source: "gpt-oss-120b & gpt-oss-20b Model Card" (arXiv:2508.10925), section 2, https://github.com/openai/gpt-oss,
    and the config.json of each model card. Its router_aux_loss_coef of 0.9 is no one's who trained it: 0.001 is that
    of transformers' class.
    """
    return dataclasses.replace(
        llama(num_layers, 2880, 2880, num_attention_heads=64, num_query_groups=8),
        kv_channels=64,
        vocab_size=201_088,
        activation="quick_geglu",
        activation_func_clamp_value=7.0,
        glu_linear_offset=1.0,
        add_bias_linear=True,
        softmax_type="learnable",
        rotary_base=150_000,
        rope_scaling="yarn",
        rope_scaling_factor=32.0,
        rope_original_max_position_embeddings=4096,
        yarn_correction_range_round_to_int=False,
        max_position_embeddings=131_072,
        window_size=(127, 0),
        window_attn_skip_freq="2",
        num_moe_experts=num_moe_experts,
        moe_ffn_hidden_size=2880,
        moe_router_topk=4,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1e-3,
    )


def _tiny_gpt_oss() -> GPTShape:
    """Windows and an original context that a short sequence exceeds; an awkward width of experts."""
    small: dict[str, Any] = {
        "window_size": (15, 0),
        "rope_original_max_position_embeddings": 32,
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 48,
    }
    return tiny(PUBLISHED["gpt_oss_20b"], **small)


PUBLISHED: dict[str, GPTShape] = {
    # https://huggingface.co/openai/gpt-oss-20b and gpt-oss-120b
    "gpt_oss_20b": _gpt_oss(24, 32),
    "gpt_oss_120b": _gpt_oss(36, 128),
}

TINY: dict[str, GPTShape] = {
    "gpt_oss_tiny": _tiny_gpt_oss(),
}
