"""Nemotron-4 and Minitron."""

import dataclasses

from models.families.base import (
    ATTENTION,
    LAYERNORM_WHOLE,
    LLAMA_BIASES,
    LLAMA_HEADS,
    NORM_BIASES,
    UNGATED_MLP,
    like_llama,
    llama,
    tiny,
)
from models.hf.block_parts import rotary
from models.hf.config_parts import tied
from models.hf.keys import Architecture
from models.hf.row_layouts import Table
from models.shapes import GPTShape


def _nemotron(
    num_layers: int, hidden_size: int, ffn_hidden_size: int, heads: tuple[int, int], kv_channels: int
) -> GPTShape:
    """LayerNorm that multiplies by 1 + weight, squared ReLU, RoPE on half of each head. heads: (query, key-value).

    Source: "Nemotron-4 340B Technical Report" (arXiv:2406.11704), section 2.1 and table 1, and the config.json of
    nvidia/Minitron-4B-Base.
    """
    return dataclasses.replace(
        llama(num_layers, hidden_size, ffn_hidden_size, *heads),
        kv_channels=kv_channels,
        vocab_size=256_000,
        normalization="LayerNorm",
        layernorm_zero_centered_gamma=True,
        activation="squared_relu",
        rotary_percent=0.5,
        hf_model_type="nemotron",
    )


PUBLISHED: dict[str, GPTShape] = {
    # https://huggingface.co/nvidia/Minitron-4B-Base
    "minitron_4b": _nemotron(32, 3072, 9216, (24, 8), 128),
    # https://huggingface.co/nvidia/Nemotron-4-340B-Base
    "nemotron4_340b": _nemotron(96, 18432, 73728, (96, 8), 192),
}

TINY: dict[str, GPTShape] = {"nemotron_tiny": tiny(PUBLISHED["minitron_4b"])}


ARCHITECTURES: dict[str, Architecture] = {
    "nemotron": like_llama(
        "NemotronForCausalLM",
        without=("rms_norm_eps",),
        numbers={"norm_eps": "norm_epsilon"},
        defaults={"initializer_range": 0.0134, "norm_eps": 1e-5},
        switches={"hidden_act": ("relu2",)},
        implied={"normalization": "LayerNorm", "activation": "squared_relu", "layernorm_zero_centered_gamma": True},
        parts=(LLAMA_HEADS, rotary(share=0.5), tied(False), LLAMA_BIASES),
    ),
}

TABLES: dict[str, Table] = {"nemotron": Table(LAYERNORM_WHOLE, ATTENTION | NORM_BIASES | UNGATED_MLP)}
