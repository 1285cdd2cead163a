"""What families share: the Llama-like block that most grew from, siblings of laptop size, keys of their config.json and
names of their tensors.
"""

import dataclasses
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from models.hf import rope
from models.hf.block_parts import bias_switches, switched_windows
from models.hf.config_parts import heads, read_rope
from models.hf.keys import Architecture, Config, Read, Write, take_bool
from models.hf.row_layouts import Table, by_group, experts, same, stacked
from models.hf.row_layouts import vocabulary as vocab
from models.shapes import GPTShape


def llama(
    num_layers: int, hidden_size: int, ffn_hidden_size: int, num_attention_heads: int, num_query_groups: int
) -> GPTShape:
    """What nearly all later ones grew from: RMSNorm, SwiGLU, RoPE, no biases, an output layer of its own.

    With Llama 2's vocabulary, context and RoPE base. Source: "Llama 2" (arXiv:2307.09288), section 2.2, and the
    config.json of https://huggingface.co/meta-llama/Llama-2-7b-hf, -13b-hf and -70b-hf.
    """
    return GPTShape(
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_hidden_size=ffn_hidden_size,
        num_attention_heads=num_attention_heads,
        num_query_groups=num_query_groups,
        kv_channels=hidden_size // num_attention_heads,
        vocab_size=32000,
        normalization="RMSNorm",
        activation="swiglu",
        add_bias_linear=False,
        position_embedding_type="rope",
        max_position_embeddings=4096,
        untie_embeddings_and_output_weights=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def tiny(shape: GPTShape, **changes: Any) -> GPTShape:
    """The same architecture at laptop size: four blocks of width 64, four heads, the byte tokenizer's vocabulary.

    Without dropout, whose draws depend on the layout: what these are for is comparing layouts. Attention's heads are
    16 wide, or 32 where a family's heads are not hidden_size / num_attention_heads.
    """
    grouped = shape.num_query_groups < shape.num_attention_heads
    wide = shape.kv_channels * shape.num_attention_heads != shape.hidden_size and not shape.multi_latent_attention
    small = dataclasses.replace(
        shape,
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=176 if shape.gated else 256,
        num_attention_heads=4,
        num_query_groups=2 if grouped else 4,
        kv_channels=32 if wide else 16,
        vocab_size=257,
        max_position_embeddings=512,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    return dataclasses.replace(small, **changes)


LLAMA_NUMBERS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "norm_epsilon",
    "attention_dropout": "attention_dropout",
    "initializer_range": "init_method_std",
}
LLAMA_DEFAULTS = {"attention_dropout": 0.0, "initializer_range": 0.02, "rms_norm_eps": 1e-6}
LLAMA_IMPLIED = {
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "hidden_dropout": 0.0,
}
LLAMA_SWITCHES: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu",)}
EXPERT_NUMBERS = {"num_experts_per_tok": "moe_router_topk", "router_aux_loss_coef": "moe_aux_loss_coeff"}
LOCAL_EXPERT_NUMBERS = {"num_local_experts": "num_moe_experts"} | EXPERT_NUMBERS
QWEN_EXPERT_NUMBERS = {
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
} | EXPERT_NUMBERS
NOTHING: Mapping[str, Any] = MappingProxyType({})


def like_llama(
    model_class: str,
    *,
    numbers: Mapping[str, str] = NOTHING,
    defaults: Mapping[str, Any] = NOTHING,
    switches: Mapping[str, tuple[Any, ...]] = NOTHING,
    implied: Mapping[str, Any] = NOTHING,
    aliases: Mapping[str, str] = NOTHING,
    without: Collection[str] = (),
    parts: tuple[tuple[Read, Write], ...],
) -> Architecture:
    """Llama's keys, and what else a class has beside them, or in their place.

    without: Llama's keys and fields that it does not have.
    """

    def beside(llamas: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in llamas.items() if key not in without} | dict(own)

    return Architecture(
        model_class=model_class,
        numbers=beside(LLAMA_NUMBERS, numbers),
        defaults=beside(LLAMA_DEFAULTS, defaults),
        switches=beside(LLAMA_SWITCHES, switches),
        implied=beside(LLAMA_IMPLIED, implied),
        aliases=aliases,
        parts=parts,
    )


def linear_biases(default: bool) -> tuple[Read, Write]:
    """``use_bias``: of all linear layers."""

    def read(left: Config, fields: dict[str, Any]) -> None:
        fields["add_bias_linear"] = take_bool(left, "use_bias", default)

    return read, lambda shape: {"use_bias": shape.add_bias_linear}


UNBIASED = {"attention_bias": (False,)}
LLAMA_HEADS, HEADS, WIDE_HEADS = heads(("num_key_value_heads", "head_dim")), heads(("head_dim",)), heads(())
ROPE = (read_rope, rope.write)
SWITCHED_WINDOWS, WINDOWS_EVERYWHERE = switched_windows(), switched_windows(everywhere=True)
ATTENTION_BIAS, LLAMA_BIASES = bias_switches("attention_bias"), bias_switches("attention_bias", mlp="mlp_bias")


LLAMA_WHOLE = {
    "word_embeddings.weight": vocab("model.embed_tokens.weight"),
    "final_layernorm.weight": same("model.norm.weight"),
    "output_layer.weight": vocab("lm_head.weight"),
}

ATTENTION = {
    "self_attention.linear_qkv.layer_norm_weight": same("input_layernorm.weight"),
    "self_attention.linear_qkv.weight": by_group(*(f"self_attn.{kind}_proj.weight" for kind in "qkv")),
    "self_attention.linear_qkv.bias": by_group(*(f"self_attn.{kind}_proj.bias" for kind in "qkv")),
    "self_attention.q_layernorm.weight": same("self_attn.q_norm.weight"),
    "self_attention.k_layernorm.weight": same("self_attn.k_norm.weight"),
    "self_attention.linear_proj.weight": same("self_attn.o_proj.weight"),
    "self_attention.linear_proj.bias": same("self_attn.o_proj.bias"),
}

MLP = {
    "mlp.linear_fc1.layer_norm_weight": same("post_attention_layernorm.weight"),
    "mlp.linear_fc1.weight": stacked("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc1.bias": stacked("mlp.gate_proj.bias", "mlp.up_proj.bias"),
    "mlp.linear_fc2.weight": same("mlp.down_proj.weight"),
    "mlp.linear_fc2.bias": same("mlp.down_proj.bias"),
}

NORM_BIASES = {
    "self_attention.linear_qkv.layer_norm_bias": same("input_layernorm.bias"),
    "mlp.linear_fc1.layer_norm_bias": same("post_attention_layernorm.bias"),
}
"""Of LayerNorm."""

UNGATED_MLP = {
    "mlp.linear_fc1.layer_norm_weight": same("post_attention_layernorm.weight"),
    "mlp.linear_fc1.weight": same("mlp.up_proj.weight"),
    "mlp.linear_fc1.bias": same("mlp.up_proj.bias"),
    "mlp.linear_fc2.weight": same("mlp.down_proj.weight"),
    "mlp.linear_fc2.bias": same("mlp.down_proj.bias"),
}

EXPERTS = {
    "pre_mlp_layernorm.weight": same("post_attention_layernorm.weight"),
    "mlp.router.weight": same("mlp.gate.weight"),
    "mlp.router.expert_bias": same("mlp.gate.e_score_correction_bias"),
    "mlp.experts.linear_fc1.weight": experts(
        "mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"
    ),
    "mlp.experts.linear_fc2.weight": experts("mlp.experts.{expert}.down_proj.weight"),
    "mlp.shared_experts.linear_fc1.weight": stacked(
        "mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"
    ),
    "mlp.shared_experts.linear_fc2.weight": same("mlp.shared_experts.down_proj.weight"),
}

LAYERNORM_WHOLE = LLAMA_WHOLE | {"final_layernorm.bias": same("model.norm.bias")}

GATED_SHARED_EXPERT = {
    "mlp.shared_experts.linear_fc1.weight": stacked(
        "mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"
    ),
    "mlp.shared_experts.linear_fc2.weight": same("mlp.shared_expert.down_proj.weight"),
    "mlp.shared_experts.gate_weight": same("mlp.shared_expert_gate.weight"),
}
"""Qwen's, one that is as wide as several."""

LLAMA = Table(LLAMA_WHOLE, ATTENTION | MLP)
