"""Qwen3.5 (text): Qwen3-Next's blocks, whose gated delta nets have their projections in four tensors, with a dense MLP
in the smaller models and experts in the larger ones.
"""

import dataclasses
from typing import Any

from models.families.base import (
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
from models.families.qwen3_next import (
    DELTA_NET,
    EXPERT_DEFAULTS,
    EXPERTS_IMPLIED,
    GATED,
    GATED_ATTENTION,
    LINEAR_DEFAULTS,
    LINEAR_NUMBERS,
    TINY_HEADS,
    read_kinds,
    write_kinds,
)
from models.hf.block_parts import rotary
from models.hf.config_parts import qwen_moe, tied, write_qwen_moe
from models.hf.keys import Architecture, Config, Read, Unsupported, Write
from models.hf.row_layouts import Table, delta_parts
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

TINY: dict[str, GPTShape] = {
    "qwen35_tiny": tiny(PUBLISHED["qwen35_9b"], **TINY_HEADS),
    "qwen35_moe_tiny": tiny(
        PUBLISHED["qwen35_35b_a3b"],
        **TINY_HEADS,
        num_moe_experts=4,
        moe_ffn_hidden_size=64,
        moe_router_topk=2,
        moe_shared_expert_intermediate_size=64,
    ),
}


_UNREAD = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype")
"""Keys of published files that transformers' classes do not read: of multi-token prediction, whose tensors they drop,
and of the precision of states, which is fp32 there and here."""

_OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""Which channels turn by a token's place in an image: by its place in the text where there is no image."""


def _defaults(key_value_heads: int) -> Read:
    """What their class has where a key is left out, and what says nothing of text."""

    def read(left: Config, fields: dict[str, Any]) -> None:
        for key, value in {"head_dim": 256, "num_key_value_heads": key_value_heads}.items():
            left.setdefault(key, value)
        for key in _UNREAD:
            left.pop(key, None)
        for key in ("rope_parameters", "rope_scaling"):
            if isinstance(rope := left.get(key), dict):
                left[key] = {name: value for name, value in rope.items() if name not in _OF_IMAGES}

    return read


def _read_experts(left: Config, fields: dict[str, Any]) -> None:
    """In every block, with weights that sum to 1, whatever the keys of Qwen3-Next's configuration say."""
    if left.setdefault("norm_topk_prob", True) is not True:
        raise Unsupported("norm_topk_prob", left["norm_topk_prob"], "true: their router has no other weights")
    qwen_moe(256)[0](left, fields)
    if fields["moe_layer_freq"] != "1":
        raise Unsupported("mlp_only_layers or decoder_sparse_step", fields["moe_layer_freq"], "experts in every block")
    fields["ffn_hidden_size"] = fields["moe_ffn_hidden_size"]


def _write_experts(shape: GPTShape) -> Config:
    """As ``_read_experts``."""
    written = write_qwen_moe(shape)
    return {key: written[key] for key in ("num_experts", "moe_intermediate_size")}


def _parts(key_value_heads: int) -> tuple[tuple[Read, Write], ...]:
    defaults: tuple[Read, Write] = (_defaults(key_value_heads), lambda _: {})
    return defaults, WIDE_HEADS, rotary(share=0.25), tied(False), (read_kinds, write_kinds)


_SWITCHES = UNBIASED | {"linear_conv_kernel_dim": (4,), "attn_output_gate": (True,)}

ARCHITECTURES: dict[str, Architecture] = {
    "qwen3_5_text": like_llama(
        "Qwen3_5ForCausalLM",
        numbers=LINEAR_NUMBERS,
        defaults=LINEAR_DEFAULTS,
        switches=_SWITCHES,
        implied=GATED,
        parts=_parts(key_value_heads=4),
    ),
    "qwen3_5_moe_text": like_llama(
        "Qwen3_5MoeForCausalLM",
        numbers=LINEAR_NUMBERS | QWEN_EXPERT_NUMBERS,
        defaults=LINEAR_DEFAULTS | EXPERT_DEFAULTS | {"num_experts_per_tok": 8},
        switches=_SWITCHES,
        implied=GATED | EXPERTS_IMPLIED,
        without=("intermediate_size",),
        parts=(*_parts(key_value_heads=2), (_read_experts, _write_experts)),
    ),
}

_PROJECTIONS = (f"linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a"))
_DELTA_NET = DELTA_NET | {"self_attention.in_proj.weight": delta_parts(*_PROJECTIONS)}
_OF_EXPERT = "mlp.experts.{expert}."

TABLES: dict[str, Table] = {
    "qwen3_5_text": Table(LLAMA_WHOLE, GATED_ATTENTION | _DELTA_NET | MLP, nested="language_model."),
    "qwen3_5_moe_text": Table(
        LLAMA_WHOLE,
        GATED_ATTENTION | _DELTA_NET | EXPERTS | GATED_SHARED_EXPERT,
        nested="language_model.",
        fused={
            "mlp.experts.gate_up_proj": (f"{_OF_EXPERT}gate_proj.weight", f"{_OF_EXPERT}up_proj.weight"),
            "mlp.experts.down_proj": (f"{_OF_EXPERT}down_proj.weight",),
        },
    ),
}
