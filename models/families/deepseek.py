"""DeepSeek-V2 and V3."""

import dataclasses
from typing import Any

from models.families.base import llama, tiny
from models.shapes import GPTShape


def _deepseek(
    num_layers: int, hidden_size: int, ffn_hidden_size: int, num_attention_heads: int, **changes: Any
) -> GPTShape:
    """What DeepSeek-V2 and V3 share: latent attention, experts beside shared ones, positions stretched by YaRN.

    The weights of chosen experts are those of a softmax over all, so they do not sum to 1, and each sequence is
    balanced. (V2's further balancing losses, over devices and their communication, are not in megatron-core.)
    Source: "DeepSeek-V2" (arXiv:2405.04434), sections 2.1, 2.2 and 3.1.2 and appendix B, and each config.json.
    """
    shape = dataclasses.replace(
        llama(num_layers, hidden_size, ffn_hidden_size, num_attention_heads, num_attention_heads),
        kv_channels=128,  # not used by latent attention; Megatron's scripts say so
        vocab_size=102400,
        norm_epsilon=1e-6,
        qk_layernorm=True,
        multi_latent_attention=True,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_head_dim=128,
        qk_pos_emb_head_dim=64,
        v_head_dim=128,
        rope_scaling="yarn",
        rope_scaling_factor=40.0,
        rope_original_max_position_embeddings=4096,
        mscale=0.707,
        mscale_all_dim=0.707,
        max_position_embeddings=163_840,
        moe_layer_freq=f"[0]*1+[1]*{num_layers - 1}",
        moe_router_topk=6,
        moe_router_pre_softmax=True,
        moe_router_load_balancing_type="seq_aux_loss",
    )
    return dataclasses.replace(shape, **changes)


def deepseek_v3_like(
    num_layers: int, hidden_size: int, ffn_hidden_size: int, num_attention_heads: int, **changes: Any
) -> GPTShape:
    """DeepSeek-V3's family: sigmoid scores, balanced by a bias; the loss over a sequence only guards against extremes.

    Source: "DeepSeek-V3 Technical Report" (arXiv:2412.19437), sections 2 and 4.2.
    """
    settings: dict[str, Any] = {
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "moe_router_topk": 8,
        "moe_router_pre_softmax": False,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 1e-3,
    }
    return _deepseek(num_layers, hidden_size, ffn_hidden_size, num_attention_heads, **settings | changes)


def tiny_deepseek(shape: GPTShape, **changes: Any) -> GPTShape:
    """One dense block and three of eight small experts; an original context that a short sequence exceeds."""
    groups = shape.moe_router_num_groups > 0
    return tiny(
        shape,
        q_lora_rank=32 if shape.q_lora_rank else 0,
        kv_lora_rank=32,
        qk_head_dim=16,
        qk_pos_emb_head_dim=8,
        v_head_dim=16,
        rope_original_max_position_embeddings=32,
        num_moe_experts=8,
        moe_layer_freq="[0]*1+[1]*3",
        moe_ffn_hidden_size=32,
        moe_shared_expert_intermediate_size=32,
        moe_router_topk=2,
        moe_router_num_groups=2 if groups else 0,
        moe_router_group_topk=1 if groups else 0,
        **changes,
    )


PUBLISHED: dict[str, GPTShape] = {
    # https://huggingface.co/deepseek-ai/DeepSeek-V2-Lite; arXiv:2405.04434, appendix B
    "deepseek_v2_lite": _deepseek(
        27,
        2048,
        10944,
        16,
        q_lora_rank=0,
        num_moe_experts=64,
        moe_ffn_hidden_size=1408,
        moe_shared_expert_intermediate_size=2 * 1408,
        moe_aux_loss_coeff=0.001,
    ),
    # https://huggingface.co/deepseek-ai/DeepSeek-V2; arXiv:2405.04434, section 3.1.2
    "deepseek_v2": _deepseek(
        60,
        5120,
        12288,
        128,
        num_moe_experts=160,
        moe_ffn_hidden_size=1536,
        moe_shared_expert_intermediate_size=2 * 1536,
        moe_router_num_groups=8,
        moe_router_group_topk=3,
        moe_router_topk_scaling_factor=16.0,
        moe_aux_loss_coeff=0.003,
    ),
    # https://huggingface.co/deepseek-ai/DeepSeek-V3. The weight of multi-token prediction is that of its first 10 of
    # 14.8 T tokens (then 0.1).
    "deepseek_v3": deepseek_v3_like(
        61,
        7168,
        18432,
        128,
        vocab_size=129280,
        num_moe_experts=256,
        moe_layer_freq="[0]*3+[1]*58",
        moe_ffn_hidden_size=2048,
        moe_shared_expert_intermediate_size=2048,
        moe_router_num_groups=8,
        moe_router_group_topk=4,
        moe_router_topk_scaling_factor=2.5,
        moe_aux_loss_coeff=1e-4,
        mtp_num_layers=1,
        mtp_loss_scaling_factor=0.3,
    ),
}

TINY: dict[str, GPTShape] = {
    "deepseek_v2_tiny": tiny_deepseek(PUBLISHED["deepseek_v2"]),
    "deepseek_v3_tiny": tiny_deepseek(PUBLISHED["deepseek_v3"]),
}
