"""Kimi K2 and Moonlight: DeepSeek-V3's architecture, of other sizes."""

from typing import Any

from models.families.deepseek import deepseek_v3_like, tiny_deepseek
from models.shapes import GPTShape


def _moonshot(num_layers: int, hidden_size: int, ffn_hidden_size: int, heads: int, **changes: Any) -> GPTShape:
    """What both share: sigmoid scores balanced by a bias, no groups of experts, no multi-token prediction."""
    settings: dict[str, Any] = {
        "vocab_size": 163840,
        "rotary_base": 50_000,
        "moe_layer_freq": f"[0]*1+[1]*{num_layers - 1}",
        "moe_router_num_groups": 0,
        "moe_router_group_topk": 0,
        "moe_aux_loss_coeff": 0.001,
        "mtp_num_layers": 0,
    }
    return deepseek_v3_like(num_layers, hidden_size, ffn_hidden_size, heads, **settings | changes)


PUBLISHED: dict[str, GPTShape] = {
    # https://huggingface.co/moonshotai/Moonlight-16B-A3B; "Muon is Scalable for LLM Training" (arXiv:2502.16982),
    # table 1. Its latents are normed with DeepSeek's 1e-6, all else with 1e-5.
    "moonlight_16b_a3b": _moonshot(
        27,
        2048,
        11264,
        16,
        q_lora_rank=0,
        norm_epsilon=1e-5,
        latent_norm_epsilon=1e-6,
        rope_scaling="none",
        rope_scaling_factor=1.0,
        max_position_embeddings=8192,
        num_moe_experts=64,
        moe_router_topk=6,
        moe_ffn_hidden_size=1408,
        moe_shared_expert_intermediate_size=2 * 1408,
        moe_router_topk_scaling_factor=2.446,
    ),
    # https://huggingface.co/moonshotai/Kimi-K2-Base; "Kimi K2" (arXiv:2507.20534), table 2 and section 2.5. YaRN with
    # equal bounds: all channels above or below one wavelength.
    "kimi_k2": _moonshot(
        61,
        7168,
        18432,
        64,
        rope_scaling_factor=32.0,
        yarn_beta_fast=1.0,
        yarn_beta_slow=1.0,
        max_position_embeddings=131_072,
        num_moe_experts=384,
        moe_ffn_hidden_size=2048,
        moe_shared_expert_intermediate_size=2048,
        moe_router_topk_scaling_factor=2.827,
    ),
}

TINY: dict[str, GPTShape] = {
    "moonlight_tiny": tiny_deepseek(PUBLISHED["moonlight_16b_a3b"]),
    "kimi_k2_tiny": tiny_deepseek(PUBLISHED["kimi_k2"]),
}
