"""Nemotron: Nemotron-4 and Minitron."""

from models.hf.block_parts import rotary
from models.hf.config_parts import tied
from models.hf.families.base import (
    ATTENTION,
    LAYERNORM_IMPLIED,
    LAYERNORM_WHOLE,
    LLAMA_BIASES,
    LLAMA_HEADS,
    LLAMA_NUMBERS,
    NORM_BIASES,
    UNGATED_MLP,
)
from models.hf.keys import Architecture
from models.hf.table import Table

_NUMBERS = {key: ours for key, ours in LLAMA_NUMBERS.items() if key != "rms_norm_eps"}

ARCHITECTURES: dict[str, Architecture] = {
    "nemotron": Architecture(
        model_class="NemotronForCausalLM",
        numbers=_NUMBERS | {"norm_eps": "norm_epsilon"},
        defaults={"attention_dropout": 0.0, "initializer_range": 0.0134, "norm_eps": 1e-5},
        switches={"hidden_act": ("relu2",)},
        implied=LAYERNORM_IMPLIED | {"activation": "squared_relu", "layernorm_zero_centered_gamma": True},
        parts=(LLAMA_HEADS, rotary(share=0.5), tied(False), LLAMA_BIASES),
    ),
}

TABLES: dict[str, Table] = {"nemotron": Table(LAYERNORM_WHOLE, ATTENTION | NORM_BIASES | UNGATED_MLP)}
