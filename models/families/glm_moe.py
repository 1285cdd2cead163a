"""GLM-4.5."""

import dataclasses
from typing import Any

from models.families.base import ATTENTION, EXPERTS, HEADS, LLAMA_WHOLE, MLP, like_llama, llama, tiny
from models.families.deepseek import MTP, MTP_COPIES, MTP_DEPTHS, V3_ALIASES
from models.hf.block_parts import rotary
from models.hf.config_parts import tied
from models.hf.deepseek import deepseek_experts, read_v3_choice
from models.hf.keys import Architecture, Config, take_bool
from models.hf.row_layouts import Table
from models.shapes import GPTShape


def _glm45(num_layers: int, hidden_size: int, ffn_hidden_size: int, **changes: Any) -> GPTShape:
    """Half of each head's channels turned, biases on queries, keys and values, DeepSeek-V3's router without groups, and
    one depth of multi-token prediction.

    Source: "GLM-4.5" (arXiv:2508.06471), table 1 and sections 2.1 and 2.4 (the weight of multi-token prediction is that
    of its first 15 T tokens), and the config.json of each model card.
    """
    settings: dict[str, Any] = {
        "kv_channels": 128,
        "vocab_size": 151552,
        "add_qkv_bias": True,
        "rotary_base": 1_000_000,
        "rotary_percent": 0.5,
        "max_position_embeddings": 131_072,
        "moe_shared_expert_intermediate_size": changes["moe_ffn_hidden_size"],
        "moe_router_topk": 8,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 1e-4,
        "mtp_num_layers": 1,
        "mtp_loss_scaling_factor": 0.3,
    }
    shape = llama(num_layers, hidden_size, ffn_hidden_size, num_attention_heads=96, num_query_groups=8)
    return dataclasses.replace(shape, **settings | changes)


PUBLISHED: dict[str, GPTShape] = {
    # https://huggingface.co/zai-org/GLM-4.5-Base and GLM-4.5-Air-Base
    "glm45": _glm45(
        92,
        5120,
        12288,
        qk_layernorm=True,
        num_moe_experts=160,
        moe_layer_freq="[0]*3+[1]*89",
        moe_ffn_hidden_size=1536,
        moe_router_topk_scaling_factor=2.5,
    ),
    "glm45_air": _glm45(46, 4096, 10944, num_moe_experts=128, moe_layer_freq="[0]*1+[1]*45", moe_ffn_hidden_size=1408),
}

TINY: dict[str, GPTShape] = {
    "glm45_tiny": tiny(
        PUBLISHED["glm45"],
        num_moe_experts=6,
        moe_layer_freq="[0]*1+[1]*3",
        moe_router_topk=3,
        moe_ffn_hidden_size=40,
        moe_shared_expert_intermediate_size=40,
    ),
}


_EXPERT_DEFAULTS = {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}


def _read(left: Config, fields: dict[str, Any]) -> None:
    """attention_bias is not of the output projection."""
    fields["add_qkv_bias"] = take_bool(left, "attention_bias", False)
    fields["qk_layernorm"] = take_bool(left, "use_qk_norm", False)


def _write(shape: GPTShape) -> Config:
    """As ``_read``."""
    return {"attention_bias": shape.qkv_bias, "use_qk_norm": shape.qk_layernorm}


ARCHITECTURES: dict[str, Architecture] = {
    "glm4_moe": like_llama(
        "Glm4MoeForCausalLM",
        numbers={
            "n_routed_experts": "num_moe_experts",
            "moe_intermediate_size": "moe_ffn_hidden_size",
            "num_experts_per_tok": "moe_router_topk",
            "routed_scaling_factor": "moe_router_topk_scaling_factor",
        },
        defaults={
            "rms_norm_eps": 1e-5,
            "n_routed_experts": 128,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 8,
            "routed_scaling_factor": 1.0,
        },
        switches={"norm_topk_prob": (True,)},
        implied={
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_load_balancing_type": "seq_aux_loss",
            "moe_aux_loss_coeff": 1e-4,  # no key of theirs; arXiv:2508.06471, section 2.4
            "mtp_loss_scaling_factor": 0.3,
        },
        aliases=V3_ALIASES,
        parts=(
            HEADS,
            (_read, _write),
            rotary(share=0.5),
            tied(False),
            deepseek_experts(_EXPERT_DEFAULTS),
            (read_v3_choice, lambda _: {}),
            MTP_DEPTHS,
        ),
    ),
}

TABLES: dict[str, Table] = {
    "glm4_moe": Table(
        LLAMA_WHOLE,
        ATTENTION | MLP | EXPERTS | MTP,
        mtp_copies=MTP_COPIES,
    ),
}
