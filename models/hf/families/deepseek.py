"""DeepSeek-V2 and V3; Moonlight and Kimi K2, which are V3s."""

import dataclasses

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
from models.hf.families.base import (
    EXPERTS,
    LLAMA_DEFAULTS,
    LLAMA_IMPLIED,
    LLAMA_NUMBERS,
    LLAMA_WHOLE,
    MLP,
    ROPE,
    UNBIASED,
)
from models.hf.keys import Architecture
from models.hf.row_layouts import same
from models.hf.table import Table

_DEEPSEEK_NUMBERS = LLAMA_NUMBERS | {
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
    "n_routed_experts": "num_moe_experts",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "num_experts_per_tok": "moe_router_topk",
    "routed_scaling_factor": "moe_router_topk_scaling_factor",
}
V3_ALIASES = {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"}
_DEEPSEEK_IMPLIED = LLAMA_IMPLIED | {
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
MTP = {
    "enorm.weight": same("enorm.weight"),
    "hnorm.weight": same("hnorm.weight"),
    "eh_proj.weight": same("eh_proj.weight"),
    "final_layernorm.weight": same("shared_head.norm.weight"),
}


ARCHITECTURES: dict[str, Architecture] = {
    "deepseek_v2": Architecture(
        model_class="DeepseekV2ForCausalLM",
        numbers=_DEEPSEEK_NUMBERS,
        defaults=LLAMA_DEFAULTS | {"routed_scaling_factor": 1.0},
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
    "deepseek_v3": Architecture(
        model_class="DeepseekV3ForCausalLM",
        numbers=_DEEPSEEK_NUMBERS,
        defaults=LLAMA_DEFAULTS | {"routed_scaling_factor": 2.5},
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
            (read_mtp, lambda shape: {"num_nextn_predict_layers": shape.mtp_num_layers}),
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
        mtp_copies={
            "embed_tokens.weight": "word_embeddings.weight",
            "shared_head.head.weight": "output_layer.weight",
        },
    ),
}
TABLES["kimi_k2"] = TABLES["deepseek_v3"]
