"""Gemma 1, 2 and 3 (text)."""

import dataclasses
from typing import Any

from models.families.base import ATTENTION, ATTENTION_BIAS, LLAMA_WHOLE, MLP, ROPE, WIDE_HEADS, like_llama, llama, tiny
from models.hf.block_parts import layer_windows, read_softcap, rotary_by_window
from models.hf.config_parts import heads, tied
from models.hf.keys import Architecture, Config, Unsupported, pop_number
from models.hf.row_layouts import Table, same
from models.shapes import GPTShape
from models.spans import HEADS, Span


def _gemma(num_layers: int, hidden_size: int, ffn_hidden_size: int, heads: tuple[int, int], **changes: Any) -> GPTShape:
    """GeGLU, norms that multiply by 1 + weight, embeddings times sqrt(hidden_size), tied; wide heads, 256,000 words.

    heads: (query, key-value). Source: "Gemma" (arXiv:2403.08295), section 2, and each config.json.
    """
    shape = dataclasses.replace(
        llama(num_layers, hidden_size, ffn_hidden_size, *heads),
        kv_channels=256,
        vocab_size=256_000,
        activation="geglu",
        norm_epsilon=1e-6,
        layernorm_zero_centered_gamma=True,
        embedding_multiplier=hidden_size**0.5,
        max_position_embeddings=8192,
        untie_embeddings_and_output_weights=False,
        hf_model_type="gemma",
    )
    return dataclasses.replace(shape, **changes)


def _gemma2(*sizes: Any, **changes: Any) -> GPTShape:
    """Norms before and behind attention and MLP, soft caps, windows of 4,096 tokens in every other block.

    Source: "Gemma 2" (arXiv:2408.00118), section 2, and each config.json.
    """
    return dataclasses.replace(
        _gemma(*sizes),
        norm_placement="both",
        window_size=(4095, 0),
        window_attn_skip_freq="2",
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        hf_model_type="gemma2",
        **changes,
    )


def _gemma3(*sizes: Any, **changes: Any) -> GPTShape:
    """Norms of queries and keys instead of soft caps; five of six blocks with windows, and a RoPE base of their own.

    Source: "Gemma 3 Technical Report" (arXiv:2503.19786), section 2, and the text_config of each config.json.
    """
    shape = dataclasses.replace(
        _gemma(*sizes),
        vocab_size=262_208,
        norm_placement="both",
        qk_layernorm=True,
        window_size=(1023, 0),
        window_attn_skip_freq="6",
        rotary_base=1_000_000,
        rotary_base_local=10_000,
        rope_scaling="linear",
        rope_scaling_factor=8.0,
        max_position_embeddings=131_072,
        hf_model_type="gemma3_text",
    )
    return dataclasses.replace(shape, **changes)


PUBLISHED: dict[str, GPTShape] = {
    # https://huggingface.co/google/gemma-2b and gemma-7b
    "gemma_2b": _gemma(18, 2048, 16384, (8, 1)),
    "gemma_7b": _gemma(28, 3072, 24576, (16, 16)),
    # https://huggingface.co/google/gemma-2-2b, -9b, -27b; the last scales scores by hidden_size / heads
    "gemma2_2b": _gemma2(26, 2304, 9216, (8, 4)),
    "gemma2_9b": _gemma2(42, 3584, 14336, (16, 8)),
    "gemma2_27b": _gemma2(46, 4608, 36864, (32, 16), kv_channels=128, softmax_scale=144**-0.5),
    # https://huggingface.co/google/gemma-3-1b-pt, and the text models within -4b-pt, -12b-pt, -27b-pt
    "gemma3_1b": _gemma3(
        26, 1152, 6912, (4, 1), vocab_size=262_144, window_size=(511, 0), rope_scaling="none",
        rope_scaling_factor=1.0, max_position_embeddings=32768,
    ),
    "gemma3_4b": _gemma3(34, 2560, 10240, (8, 4)),
    "gemma3_12b": _gemma3(48, 3840, 15360, (16, 8)),
    "gemma3_27b": _gemma3(62, 5376, 21504, (32, 16), kv_channels=128, softmax_scale=168**-0.5),
}  # fmt: skip

_SMALL: dict[str, Any] = {"embedding_multiplier": 8.0}  # the square root of their width

TINY: dict[str, GPTShape] = {
    "gemma_tiny": tiny(PUBLISHED["gemma_7b"], **_SMALL),
    "gemma2_tiny": tiny(
        PUBLISHED["gemma2_27b"], window_size=(15, 0), softmax_scale=24**-0.5, attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0, **_SMALL,
    ),
    "gemma3_tiny": tiny(PUBLISHED["gemma3_27b"], window_size=(15, 0), window_attn_skip_freq="3",
                        softmax_scale=24**-0.5, **_SMALL),
}  # fmt: skip


_IMPLIED = {"activation": "geglu", "layernorm_zero_centered_gamma": True}
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
    "gemma": like_llama(
        "GemmaForCausalLM",
        switches={"hidden_act": _TANH, "use_bidirectional_attention": (None, False)},
        implied=_IMPLIED,
        parts=(WIDE_HEADS, ROPE, tied(True), ATTENTION_BIAS, (read_gemma, lambda _: {})),
    ),
    "gemma2": like_llama(
        "Gemma2ForCausalLM",
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
    "gemma3_text": like_llama(
        "Gemma3ForCausalLM",
        # the text_config of the 4B, the 12B and the 27B has what differs from these alone
        defaults={
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
