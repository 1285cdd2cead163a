"""Llama."""

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
from models.hf.keys import Architecture
from models.hf.table import Table

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        model_class="LlamaForCausalLM",
        numbers=LLAMA_NUMBERS,
        defaults=LLAMA_DEFAULTS,
        switches=LLAMA_SWITCHES,
        implied=LLAMA_IMPLIED,
        parts=(LLAMA_HEADS, ROPE, tied(False), LLAMA_BIASES),
    ),
}

TABLES: dict[str, Table] = {
    "llama": LLAMA,
}
