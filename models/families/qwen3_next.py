"""Qwen3-Next: three gated delta nets for each gated attention, and many small experts."""

import dataclasses
from typing import Any

from models.families.base import (
    ATTENTION,
    EXPERTS,
    GATED_SHARED_EXPERT,
    LLAMA_WHOLE,
    MLP,
    QWEN_EXPERT_NUMBERS,
    UNBIASED,
    WIDE_HEADS,
    like_llama,
    llama,
    tiny,
)
from models.hf.block_parts import rotary
from models.hf.config_parts import TOKENS, qwen_moe, tied
from models.hf.keys import Architecture, Config, Unsupported, pop_number, take_list
from models.hf.row_layouts import Table, delta_projections, gated_by_group, same, unsqueezed
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

TINY_HEADS = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}

TINY: dict[str, GPTShape] = {
    "qwen3_next_tiny": tiny(
        PUBLISHED["qwen3_next_80b_a3b"],
        **TINY_HEADS,
        num_moe_experts=4,
        moe_ffn_hidden_size=64,
        moe_router_topk=2,
        moe_shared_expert_intermediate_size=64,
    ),
}


LINEAR, WHOLE = "linear_attention", "full_attention"

GATED_ATTENTION = ATTENTION | {
    "self_attention.linear_qkv.weight": gated_by_group(*(f"self_attn.{kind}_proj.weight" for kind in "qkv")),
}
DELTA_NET = {
    "self_attention.in_proj.layer_norm_weight": same("input_layernorm.weight"),
    "self_attention.in_proj.weight": delta_projections(
        "linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight"
    ),
    "self_attention.conv1d.weight": unsqueezed("linear_attn.conv1d.weight", 1),
    "self_attention.dt_bias": same("linear_attn.dt_bias"),
    "self_attention.A_log": same("linear_attn.A_log"),
    "self_attention.out_norm.weight": same("linear_attn.norm.weight"),
    "self_attention.out_proj.weight": same("linear_attn.out_proj.weight"),
}


LINEAR_DEFAULTS = {
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
LINEAR_NUMBERS = {name: name for name in LINEAR_DEFAULTS}
EXPERT_DEFAULTS = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "router_aux_loss_coef": 0.001}
GATED = {"layernorm_zero_centered_gamma": True, "qk_layernorm": True, "attention_output_gate": True}
EXPERTS_IMPLIED = {"moe_shared_expert_gate": True, "moe_router_load_balancing_type": "global_aux_loss"}


def read_kinds(left: Config, fields: dict[str, Any]) -> None:
    """Which blocks attend: a list, or every how-manieth."""
    kinds, interval = take_list(left, "layer_types"), pop_number(left, "full_attention_interval", 4, TOKENS)
    layers = fields["num_layers"]
    if not kinds:
        fields["linear_attention_freq"] = str(interval)
        return
    if len(kinds) != layers or any(kind not in (LINEAR, WHOLE) for kind in kinds):
        raise Unsupported("layer_types", kinds, f'"{LINEAR}" or "{WHOLE}" for each of the {layers} layers')
    fields["linear_attention_freq"] = str([int(kind == LINEAR) for kind in kinds]).replace(" ", "")


def write_kinds(shape: GPTShape) -> Config:
    """As ``read_kinds``."""
    return {"layer_types": [LINEAR if linear else WHOLE for linear in shape.linear_blocks]}


def read_defaults(left: Config, fields: dict[str, Any]) -> None:
    """What their class has where a key is left out, and others' classes have otherwise."""
    for key, value in {"norm_topk_prob": True, "head_dim": 256, "num_key_value_heads": 2}.items():
        left.setdefault(key, value)


ARCHITECTURES: dict[str, Architecture] = {
    "qwen3_next": like_llama(
        "Qwen3NextForCausalLM",
        numbers=QWEN_EXPERT_NUMBERS | LINEAR_NUMBERS,
        defaults=EXPERT_DEFAULTS | {"num_experts_per_tok": 10} | LINEAR_DEFAULTS,
        switches=UNBIASED | {"linear_conv_kernel_dim": (4,)},
        implied=GATED | EXPERTS_IMPLIED,
        parts=(
            (read_defaults, lambda _: {}),
            WIDE_HEADS,
            rotary(share=0.25),
            tied(False),
            (read_kinds, write_kinds),
            qwen_moe(512),
        ),
    ),
}

TABLES: dict[str, Table] = {
    "qwen3_next": Table(LLAMA_WHOLE, GATED_ATTENTION | DELTA_NET | MLP | EXPERTS | GATED_SHARED_EXPERT),
}
