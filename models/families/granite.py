"""Granite 3 and 4 (dense, attention only)."""

import dataclasses

from models.families.base import LLAMA, LLAMA_BIASES, LLAMA_HEADS, ROPE, like_llama, llama, tiny
from models.hf.config_parts import tied
from models.hf.keys import Architecture, Config
from models.hf.row_layouts import Table
from models.shapes import GPTShape


def _granite(num_layers: int, hidden_size: int, ffn_hidden_size: int, logits_scaling: float, scale: float) -> GPTShape:
    """Llama's block with four multipliers, as muP has them (arXiv:2203.03466).

    Source: "Granite 3.0 Language Models" (2024), and the config.json of each model card.
    """
    return dataclasses.replace(
        llama(num_layers, hidden_size, ffn_hidden_size, 32, 8),
        vocab_size=49152,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        logits_scaling=logits_scaling,
        softmax_scale=scale,
        rotary_base=10_000_000,
        max_position_embeddings=131_072,
        untie_embeddings_and_output_weights=False,
        attention_dropout=0.1,
        hf_model_type="granite",
    )


PUBLISHED: dict[str, GPTShape] = {
    # https://huggingface.co/ibm-granite/granite-3.1-2b-base and -8b-base: softmax scales of 1 / head width
    "granite31_2b": _granite(40, 2048, 8192, logits_scaling=8.0, scale=1 / 64),
    "granite31_8b": _granite(40, 4096, 12800, logits_scaling=16.0, scale=1 / 128),
}

TINY: dict[str, GPTShape] = {"granite_tiny": tiny(PUBLISHED["granite31_8b"], softmax_scale=1 / 16)}


def write_scale(shape: GPTShape) -> Config:
    """Theirs has no word for 1 / sqrt(kv_channels)."""
    return {"attention_multiplier": shape.softmax_scale or shape.kv_channels**-0.5}


ARCHITECTURES: dict[str, Architecture] = {
    "granite": like_llama(
        "GraniteForCausalLM",
        numbers={
            "embedding_multiplier": "embedding_multiplier",
            "logits_scaling": "logits_scaling",
            "residual_multiplier": "residual_multiplier",
            "attention_multiplier": "softmax_scale",
        },
        defaults=dict.fromkeys(
            ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"), 1.0
        ),
        parts=(LLAMA_HEADS, ROPE, tied(False), LLAMA_BIASES, (lambda *_: None, write_scale)),
    ),
}

TABLES: dict[str, Table] = {"granite": LLAMA}
