"""Granite 3 and 4 (dense, attention only)."""

from models.hf.config_parts import tied
from models.hf.families.base import (
    LLAMA,
    LLAMA_BIASES,
    LLAMA_DEFAULTS,
    LLAMA_HEADS,
    LLAMA_IMPLIED,
    LLAMA_NUMBERS,
    LLAMA_SWITCHES,
    ROPE,
)
from models.hf.keys import Architecture, Config
from models.hf.table import Table
from models.shapes import GPTShape


def write_scale(shape: GPTShape) -> Config:
    """Theirs has no word for 1 / sqrt(kv_channels)."""
    return {"attention_multiplier": shape.softmax_scale or shape.kv_channels**-0.5}


ARCHITECTURES: dict[str, Architecture] = {
    "granite": Architecture(
        model_class="GraniteForCausalLM",
        numbers=LLAMA_NUMBERS
        | {
            "embedding_multiplier": "embedding_multiplier",
            "logits_scaling": "logits_scaling",
            "residual_multiplier": "residual_multiplier",
            "attention_multiplier": "softmax_scale",
        },
        defaults=LLAMA_DEFAULTS
        | dict.fromkeys(("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"), 1.0),
        switches=LLAMA_SWITCHES,
        implied=LLAMA_IMPLIED,
        parts=(LLAMA_HEADS, ROPE, tied(False), LLAMA_BIASES, (lambda *_: None, write_scale)),
    ),
}

TABLES: dict[str, Table] = {"granite": LLAMA}
