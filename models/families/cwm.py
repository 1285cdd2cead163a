"""Code World Model: Llama 3's blocks, of which every fourth, from the first on, sees more than a window."""

import dataclasses
from typing import Any

from models.families.base import LLAMA, UNBIASED, WIDE_HEADS, like_llama, llama, tiny
from models.hf import rope
from models.hf.block_parts import layer_windows
from models.hf.config_parts import WHOLE, WINDOWED, rope_unless_given, tied
from models.hf.keys import Architecture, Config
from models.hf.row_layouts import Table
from models.shapes import GPTShape

PUBLISHED: dict[str, GPTShape] = {
    # transformers' CwmConfig, whose defaults are those of https://huggingface.co/facebook/cwm
    "cwm_32b": dataclasses.replace(
        llama(64, 6144, 21504, num_attention_heads=48, num_query_groups=8),
        vocab_size=128_256,
        window_size=(8191, 0),
        window_attn_skip_freq="([0]+[1]*3)*16",
        rotary_base=1_000_000,
        rope_scaling="llama3",
        rope_scaling_factor=16.0,
        rope_low_freq_factor=1.0,
        rope_high_freq_factor=4.0,
        rope_original_max_position_embeddings=8192,
        max_position_embeddings=131_072,
        hf_model_type="cwm",
    ),
}

TINY: dict[str, GPTShape] = {
    "cwm_tiny": tiny(
        PUBLISHED["cwm_32b"],
        window_size=(15, 0),
        window_attn_skip_freq="[0,1,1,1]",
        rope_original_max_position_embeddings=64,
    ),
}

_READ_WINDOWS, _WRITE_WINDOWS = layer_windows(8192)
_UNTOLD: Config = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""RoPE where a file has none."""


def _read_windows(left: Config, fields: dict[str, Any]) -> None:
    """Where a file has no layer_types, every fourth block sees everything, from the first on."""
    if left.get("layer_types") is None:
        left["layer_types"] = [WINDOWED if block % 4 else WHOLE for block in range(fields["num_layers"])]
    _READ_WINDOWS(left, fields)


ARCHITECTURES: dict[str, Architecture] = {
    "cwm": like_llama(
        "CwmForCausalLM",
        defaults={"rms_norm_eps": 1e-5},
        switches=UNBIASED | {"mlp_bias": (False,)},
        parts=(WIDE_HEADS, (rope_unless_given(_UNTOLD), rope.write), tied(False), (_read_windows, _WRITE_WINDOWS)),
    ),
}

TABLES: dict[str, Table] = {"cwm": LLAMA}
