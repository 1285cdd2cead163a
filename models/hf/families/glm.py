"""GLM-4 of 2025 (0414), dense, and GLM-4-9B before it."""

import dataclasses

from models.hf.block_parts import bias_switches, rotary
from models.hf.config_parts import tied
from models.hf.families.base import (
    ATTENTION,
    LLAMA_DEFAULTS,
    LLAMA_IMPLIED,
    LLAMA_NUMBERS,
    LLAMA_SWITCHES,
    LLAMA_WHOLE,
    MLP,
    WIDE_HEADS,
)
from models.hf.keys import Architecture
from models.hf.row_layouts import same
from models.hf.table import Table

_GLM = Architecture(
    model_class="GlmForCausalLM",
    numbers=LLAMA_NUMBERS,
    defaults=LLAMA_DEFAULTS | {"rms_norm_eps": 1.5625e-07},
    switches=LLAMA_SWITCHES | {"attention_out_bias": (None, False)},
    implied=LLAMA_IMPLIED | {"rotary_interleaved": True},
    parts=(
        WIDE_HEADS,
        rotary(share=0.5),
        tied(False),
        bias_switches("attention_bias", out="attention_out_bias", defaults={"attention_bias": True}),
    ),
)

ARCHITECTURES: dict[str, Architecture] = {
    "glm": _GLM,
    "glm4": dataclasses.replace(
        _GLM, model_class="Glm4ForCausalLM", implied={**_GLM.implied, "norm_placement": "both"}
    ),
}

GLM = ATTENTION | MLP | {"mlp.linear_fc1.weight": same("mlp.gate_up_proj.weight")}
GLM4 = GLM | {
    "self_attention.linear_proj.post_layernorm.weight": same("post_self_attn_layernorm.weight"),
    "mlp.linear_fc2.post_layernorm.weight": same("post_mlp_layernorm.weight"),
}

TABLES: dict[str, Table] = {"glm": Table(LLAMA_WHOLE, GLM), "glm4": Table(LLAMA_WHOLE, GLM4)}
