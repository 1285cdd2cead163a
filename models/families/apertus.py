"""Apertus: xIELU with two parameters in every MLP, and norms of queries and keys."""

import dataclasses
import re

from models.families.base import (
    ATTENTION,
    ATTENTION_BIAS,
    LLAMA_HEADS,
    LLAMA_WHOLE,
    UNGATED_MLP,
    like_llama,
    llama,
    tiny,
)
from models.hf.block_parts import rotary
from models.hf.config_parts import rope_unless_given, tied
from models.hf.keys import Architecture
from models.hf.row_layouts import Table, same
from models.shapes import GPTShape


def _apertus(num_layers: int, hidden_size: int, ffn_hidden_size: int, num_attention_heads: int) -> GPTShape:
    """xIELU in an MLP without a gate, norms of queries and keys, positions stretched by the llama3 rule.

    Source: "Apertus" (arXiv:2509.14233), section 2, and each config.json.
    """
    return dataclasses.replace(
        llama(num_layers, hidden_size, ffn_hidden_size, num_attention_heads, num_query_groups=8),
        vocab_size=131_072,
        activation="xielu",
        qk_layernorm=True,
        rotary_base=12_000_000,
        rope_scaling="llama3",
        rope_scaling_factor=8.0,
        rope_original_max_position_embeddings=8192,
        max_position_embeddings=65536,
        hf_model_type="apertus",
    )


PUBLISHED: dict[str, GPTShape] = {
    # https://huggingface.co/swiss-ai/Apertus-8B-2509 and -70B-2509
    "apertus_8b": _apertus(32, 4096, 21504, 32),
    "apertus_70b": _apertus(80, 8192, 43008, 64),
}

TINY: dict[str, GPTShape] = {"apertus_tiny": tiny(PUBLISHED["apertus_8b"], rope_original_max_position_embeddings=64)}


READ_ROPE, WRITE_ROPE = rotary(theta=12_000_000.0)
STRETCHED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
"""What transformers takes where a file says nothing."""


ARCHITECTURES: dict[str, Architecture] = {
    "apertus": like_llama(
        "ApertusForCausalLM",
        defaults={"rms_norm_eps": 1e-5},
        switches={"hidden_act": ("xielu",), "mlp_bias": (False,), "qk_norm": (True,), "post_norm": (False,)},
        implied={"activation": "xielu", "qk_layernorm": True},
        parts=(LLAMA_HEADS, (rope_unless_given(STRETCHED, READ_ROPE), WRITE_ROPE), tied(False), ATTENTION_BIAS),
    ),
}

BLOCK = (
    ATTENTION
    | UNGATED_MLP
    | {
        "self_attention.linear_qkv.layer_norm_weight": same("attention_layernorm.weight"),
        "mlp.linear_fc1.layer_norm_weight": same("feedforward_layernorm.weight"),
        "mlp.activation_func.alpha_p": same("mlp.act_fn.alpha_p"),
        "mlp.activation_func.alpha_n": same("mlp.act_fn.alpha_n"),
    }
)

CONSTANTS = {"mlp.act_fn.beta": 0.5, "mlp.act_fn.eps": -1e-6}
"""XIELU.BETA (models/layers/activation.py), and where transformers clamps."""

TABLES: dict[str, Table] = {
    "apertus": Table(
        LLAMA_WHOLE,
        BLOCK,
        computed=re.compile(r"(\.rotary_emb\.inv_freq|\.mlp\.act_fn\.(beta|eps))$"),
        constants=CONSTANTS,
    ),
}
