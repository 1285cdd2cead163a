"""Gemma 1, 2 and 3 (text)."""

from typing import Any

from models.hf.block_parts import layer_windows, read_softcap, rotary_by_window
from models.hf.config_parts import heads, tied
from models.hf.families.base import (
    ATTENTION,
    ATTENTION_BIAS,
    LLAMA_DEFAULTS,
    LLAMA_IMPLIED,
    LLAMA_NUMBERS,
    LLAMA_WHOLE,
    MLP,
    ROPE,
    WIDE_HEADS,
)
from models.hf.keys import HEADS, Architecture, Config, Span, Unsupported, pop_number
from models.hf.row_layouts import same
from models.hf.table import Table
from models.shapes import GPTShape

_IMPLIED = LLAMA_IMPLIED | {"activation": "geglu", "layernorm_zero_centered_gamma": True}
_BOTH = _IMPLIED | {"norm_placement": "both"}
_TANH = ("gelu_pytorch_tanh",)
SCALAR = Span(1, HEADS.most, whole=True)


def read_scales(left: Config, fields: dict[str, Any]) -> None:
    """Embeddings times sqrt(hidden_size); scores by query_pre_attn_scalar, where a family has that."""
    fields["embedding_multiplier"] = fields["hidden_size"] ** 0.5
    scalar = pop_number(left, "query_pre_attn_scalar", 256, SCALAR)
    fields["softmax_scale"] = 0.0 if scalar == fields["kv_channels"] else scalar**-0.5


def write_scales(shape: GPTShape) -> Config:
    """As ``read_scales``."""
    return {"query_pre_attn_scalar": round(shape.softmax_scale**-2) if shape.softmax_scale else shape.kv_channels}


def read_gemma(left: Config, fields: dict[str, Any]) -> None:
    """Of the first one: the embeddings' factor alone. ``hidden_activation`` is null, or what hidden_act says."""
    fields["embedding_multiplier"] = fields["hidden_size"] ** 0.5
    if (found := left.pop("hidden_activation", None)) not in (None, *_TANH):
        raise Unsupported("hidden_activation", found, f"{_TANH[0]!r} or null")


def read_caps(left: Config, fields: dict[str, Any]) -> None:
    """Gemma-2's, of scores and logits."""
    fields["final_logit_softcapping"] = read_softcap(left, "final_logit_softcapping", 30.0)
    fields["attn_logit_softcapping"] = read_softcap(left, "attn_logit_softcapping", 50.0)


def write_caps(shape: GPTShape) -> Config:
    """As ``read_caps``."""
    keys = ("final_logit_softcapping", "attn_logit_softcapping")
    return {key: getattr(shape, key) or None for key in keys}


def read_final_cap(left: Config, fields: dict[str, Any]) -> None:
    """Gemma-3's, of logits alone: transformers reads no other."""
    fields["final_logit_softcapping"] = read_softcap(left, "final_logit_softcapping", None)
    if cap := read_softcap(left, "attn_logit_softcapping", None):
        raise Unsupported("attn_logit_softcapping", cap, "null: transformers' Gemma-3 caps no scores")
    left.pop("sliding_window_pattern", None)


ARCHITECTURES: dict[str, Architecture] = {
    "gemma": Architecture(
        model_class="GemmaForCausalLM",
        numbers=LLAMA_NUMBERS,
        defaults=LLAMA_DEFAULTS,
        switches={"hidden_act": _TANH, "use_bidirectional_attention": (None, False)},
        implied=_IMPLIED,
        parts=(WIDE_HEADS, ROPE, tied(True), ATTENTION_BIAS, (read_gemma, lambda _: {})),
    ),
    "gemma2": Architecture(
        model_class="Gemma2ForCausalLM",
        numbers=LLAMA_NUMBERS,
        defaults=LLAMA_DEFAULTS,
        switches={
            "hidden_activation": _TANH,
            "hidden_act": (None, *_TANH),
            "use_bidirectional_attention": (None, False),
        },
        implied=_BOTH,
        parts=(
            WIDE_HEADS,
            ROPE,
            tied(True),
            ATTENTION_BIAS,
            layer_windows(4096, pattern=2),
            (read_scales, write_scales),
            (read_caps, write_caps),
        ),
    ),
    "gemma3_text": Architecture(
        model_class="Gemma3ForCausalLM",
        numbers=LLAMA_NUMBERS,
        # the text_config of the 4B, the 12B and the 27B has what differs from these alone
        defaults=LLAMA_DEFAULTS
        | {
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "max_position_embeddings": 131_072,
        },
        switches={
            "hidden_activation": _TANH,
            "hidden_act": (None, *_TANH),
            "use_bidirectional_attention": (False, None),
        },
        implied=_BOTH | {"qk_layernorm": True},
        parts=(
            heads((), {"num_key_value_heads": 4, "head_dim": 256}),
            layer_windows(4096, pattern=6, pattern_key="sliding_window_pattern"),
            rotary_by_window(1_000_000.0, local=10_000.0),
            tied(True),
            ATTENTION_BIAS,
            (read_scales, write_scales),
            (read_final_cap, lambda shape: {"final_logit_softcapping": shape.final_logit_softcapping or None}),
        ),
    ),
}

BLOCK = (
    ATTENTION
    | MLP
    | {
        "self_attention.linear_proj.post_layernorm.weight": same("post_attention_layernorm.weight"),
        "mlp.linear_fc1.layer_norm_weight": same("pre_feedforward_layernorm.weight"),
        "mlp.linear_fc2.post_layernorm.weight": same("post_feedforward_layernorm.weight"),
    }
)

TABLES: dict[str, Table] = {
    "gemma": Table(LLAMA_WHOLE, ATTENTION | MLP),
    "gemma2": Table(LLAMA_WHOLE, BLOCK),
    "gemma3_text": Table(LLAMA_WHOLE, BLOCK),
}
