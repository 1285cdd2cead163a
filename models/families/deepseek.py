"""DeepSeek-V2 and V3, and what Moonlight and Kimi K2 have of V3."""

import dataclasses
from typing import Any

from models.families.base import EXPERTS, LLAMA_WHOLE, MLP, ROPE, UNBIASED, like_llama, llama, tiny
from models.hf.config_parts import tied
from models.hf.deepseek import (
    V2_DEFAULTS,
    V3_DEFAULTS,
    deepseek_experts,
    read_latent,
    read_mtp,
    read_quantization,
    read_v2_choice,
    read_v3_choice,
    write_latent,
    write_v2_choice,
)
from models.hf.keys import Architecture
from models.hf.row_layouts import Table, same
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


_DEEPSEEK_NUMBERS = {
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
    "n_routed_experts": "num_moe_experts",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "num_experts_per_tok": "moe_router_topk",
    "routed_scaling_factor": "moe_router_topk_scaling_factor",
}
MTP_DEPTHS = (read_mtp, lambda shape: {"num_nextn_predict_layers": shape.mtp_num_layers})
V3_ALIASES = {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"}
_DEEPSEEK_IMPLIED = {
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "moe_router_load_balancing_type": "seq_aux_loss",
}
_DEEPSEEK_PARTS = (
    (read_latent, write_latent),
    ROPE,
    tied(False),
)

# No rows change places, although transformers' V2 and V3 and megatron-core pair the rotated channels in different
# orders: each order is the same for queries and keys, so it does not show in their product.
LATENT_ATTENTION = {
    "input_layernorm.weight": same("input_layernorm.weight"),
    "self_attention.linear_q_proj.weight": same("self_attn.q_proj.weight"),
    "self_attention.linear_q_down_proj.weight": same("self_attn.q_a_proj.weight"),
    "self_attention.linear_q_up_proj.layer_norm_weight": same("self_attn.q_a_layernorm.weight"),
    "self_attention.linear_q_up_proj.weight": same("self_attn.q_b_proj.weight"),
    "self_attention.linear_kv_down_proj.weight": same("self_attn.kv_a_proj_with_mqa.weight"),
    "self_attention.linear_kv_up_proj.layer_norm_weight": same("self_attn.kv_a_layernorm.weight"),
    "self_attention.linear_kv_up_proj.weight": same("self_attn.kv_b_proj.weight"),
    "self_attention.linear_proj.weight": same("self_attn.o_proj.weight"),
}

# DeepSeek-V3's README_WEIGHTS.md: the block after the last is that of multi-token prediction; it holds the embedding
# and the output layer once more.
MTP_COPIES = {"embed_tokens.weight": "word_embeddings.weight", "shared_head.head.weight": "output_layer.weight"}
MTP = {
    "enorm.weight": same("enorm.weight"),
    "hnorm.weight": same("hnorm.weight"),
    "eh_proj.weight": same("eh_proj.weight"),
    "final_layernorm.weight": same("shared_head.norm.weight"),
}


ARCHITECTURES: dict[str, Architecture] = {
    "deepseek_v2": like_llama(
        "DeepseekV2ForCausalLM",
        numbers=_DEEPSEEK_NUMBERS,
        defaults={"routed_scaling_factor": 1.0},
        switches=UNBIASED
        | {
            "mlp_bias": (False,),
            "moe_layer_freq": (1,),
            "scoring_func": ("softmax",),
            "norm_topk_prob": (False,),
        },
        implied=_DEEPSEEK_IMPLIED | {"moe_router_pre_softmax": True},
        aliases={"num_experts": "n_routed_experts"},
        parts=(*_DEEPSEEK_PARTS, deepseek_experts(V2_DEFAULTS), (read_v2_choice, write_v2_choice)),
    ),
    "deepseek_v3": like_llama(
        "DeepseekV3ForCausalLM",
        numbers=_DEEPSEEK_NUMBERS,
        defaults={"routed_scaling_factor": 2.5},
        switches=UNBIASED
        | {
            "moe_layer_freq": (1,),
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
            "norm_topk_prob": (True,),
            "rope_interleave": (True,),
        },
        implied=_DEEPSEEK_IMPLIED
        | {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_aux_loss_coeff": 1e-4,  # no key of theirs; arXiv:2412.19437, section 4.2
            "mtp_loss_scaling_factor": 0.3,
        },
        aliases=V3_ALIASES,
        parts=(
            *_DEEPSEEK_PARTS,
            deepseek_experts(V3_DEFAULTS),
            (read_v3_choice, lambda _: {}),
            MTP_DEPTHS,
            (read_quantization, lambda _: {}),
        ),
    ),
}
# Kimi K2's own class of configurations has DeepSeek-V3's keys; transformers has none of that name, so that exported
# models are written as deepseek_v3.
ARCHITECTURES["kimi_k2"] = dataclasses.replace(
    ARCHITECTURES["deepseek_v3"], implied={**ARCHITECTURES["deepseek_v3"].implied, "hf_model_type": "deepseek_v3"}
)

TABLES: dict[str, Table] = {
    "deepseek_v2": Table(LLAMA_WHOLE, LATENT_ATTENTION | MLP | EXPERTS),
    "deepseek_v3": Table(
        LLAMA_WHOLE,
        LATENT_ATTENTION | MLP | EXPERTS | MTP,
        mtp_copies=MTP_COPIES,
    ),
}
TABLES["kimi_k2"] = TABLES["deepseek_v3"]
