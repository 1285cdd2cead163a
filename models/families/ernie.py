"""ERNIE-4.5, dense."""

import dataclasses
from typing import Any

from models.families.base import HEADS, LLAMA, LLAMA_DEFAULTS, LLAMA_IMPLIED, LLAMA_NUMBERS, LLAMA_SWITCHES, llama, tiny
from models.hf.block_parts import rotary
from models.hf.config_parts import tied
from models.hf.keys import Architecture, Config, take_bool
from models.hf.row_layouts import Table
from models.shapes import GPTShape

PUBLISHED: dict[str, GPTShape] = {
    # https://huggingface.co/baidu/ERNIE-4.5-0.3B-Base-PT: RoPE turns neighbouring channels
    "ernie45_0_3b": dataclasses.replace(
        llama(18, 1024, 3072, 16, 2),
        kv_channels=128,
        vocab_size=103_424,
        rotary_base=500_000,
        rotary_interleaved=True,
        max_position_embeddings=131_072,
        untie_embeddings_and_output_weights=False,
        hf_model_type="ernie4_5",
    ),
}

TINY: dict[str, GPTShape] = {"ernie45_tiny": tiny(PUBLISHED["ernie45_0_3b"])}


_NUMBERS = {key: ours for key, ours in LLAMA_NUMBERS.items() if key != "attention_dropout"}
_IMPLIED = {key: ours for key, ours in LLAMA_IMPLIED.items() if key != "add_bias_linear"}


def read_bias(left: Config, fields: dict[str, Any]) -> None:
    """Of all linear layers."""
    fields["add_bias_linear"] = take_bool(left, "use_bias", False)


ARCHITECTURES: dict[str, Architecture] = {
    "ernie4_5": Architecture(
        model_class="Ernie4_5ForCausalLM",
        numbers=_NUMBERS,
        defaults=LLAMA_DEFAULTS | {"rms_norm_eps": 1e-5},
        switches=LLAMA_SWITCHES,
        implied=_IMPLIED | {"rotary_interleaved": True, "attention_dropout": 0.0},
        parts=(
            HEADS,
            rotary(theta=500_000.0),
            tied(True),
            (read_bias, lambda shape: {"use_bias": shape.add_bias_linear}),
        ),
    ),
}

TABLES: dict[str, Table] = {"ernie4_5": LLAMA}
