"""ERNIE-4.5, dense."""

import dataclasses

from models.families.base import HEADS, LLAMA, like_llama, linear_biases, llama, tiny
from models.hf.block_parts import rotary
from models.hf.config_parts import tied
from models.hf.keys import Architecture
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


ARCHITECTURES: dict[str, Architecture] = {
    "ernie4_5": like_llama(
        "Ernie4_5ForCausalLM",
        defaults={"rms_norm_eps": 1e-5},
        implied={"rotary_interleaved": True, "attention_dropout": 0.0},
        without=("attention_dropout", "add_bias_linear"),
        parts=(
            HEADS,
            rotary(theta=500_000.0),
            tied(True),
            linear_biases(False),
        ),
    ),
}

TABLES: dict[str, Table] = {"ernie4_5": LLAMA}
