"""Gemma 1, 2 and 3 (text)."""

import dataclasses
from typing import Any

from models.families.base import llama, tiny
from models.shapes import GPTShape


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
