"""Llama 2, 3, 3.1 and 3.2."""

import dataclasses

from models.families.base import LLAMA, LLAMA_BIASES, LLAMA_HEADS, ROPE, like_llama, llama, tiny
from models.hf.config_parts import tied
from models.hf.keys import Architecture
from models.hf.row_layouts import Table
from models.shapes import GPTShape


def _llama3(num_layers: int, hidden_size: int, ffn_hidden_size: int, num_attention_heads: int) -> GPTShape:
    """Llama 3's family: 8 key-value heads, a vocabulary of 128,256, RoPE with base 500,000.

    Source: "The Llama 3 Herd of Models" (arXiv:2407.21783), table 3, and the config.json of each model card.
    """
    return dataclasses.replace(
        llama(num_layers, hidden_size, ffn_hidden_size, num_attention_heads, num_query_groups=8),
        vocab_size=128256,
        rotary_base=500_000,
        max_position_embeddings=8192,
    )


def _llama31(shape: GPTShape, factor: float = 8.0, tied: bool = False) -> GPTShape:
    """Llama 3.1 and 3.2: positions stretched to 131,072 by the llama3 rule, from the 8,192 of Llama 3."""
    return dataclasses.replace(
        shape,
        rope_scaling="llama3",
        rope_scaling_factor=factor,
        rope_low_freq_factor=1.0,
        rope_high_freq_factor=4.0,
        rope_original_max_position_embeddings=8192,
        max_position_embeddings=131_072,
        untie_embeddings_and_output_weights=not tied,
    )


PUBLISHED: dict[str, GPTShape] = {
    # https://huggingface.co/meta-llama/Llama-2-7b-hf, -13b-hf and -70b-hf
    "llama2_7b": llama(32, 4096, 11008, 32, 32),
    "llama2_13b": llama(40, 5120, 13824, 40, 40),
    "llama2_70b": llama(80, 8192, 28672, 64, 8),
    # https://huggingface.co/meta-llama/Meta-Llama-3-8B and -70B
    "llama3_8b": _llama3(32, 4096, 14336, 32),
    "llama3_70b": _llama3(80, 8192, 28672, 64),
    # https://huggingface.co/meta-llama/Llama-3.1-8B, -70B, -405B
    "llama31_8b": _llama31(_llama3(32, 4096, 14336, 32)),
    "llama31_70b": _llama31(_llama3(80, 8192, 28672, 64)),
    "llama31_405b": _llama31(_llama3(126, 16384, 53248, 128)),
    # https://huggingface.co/meta-llama/Llama-3.2-1B and -3B
    "llama32_1b": _llama31(_llama3(16, 2048, 8192, 32), factor=32.0, tied=True),
    "llama32_3b": _llama31(_llama3(28, 3072, 8192, 24), factor=32.0, tied=True),
}

TINY: dict[str, GPTShape] = {
    "llama2_tiny": tiny(PUBLISHED["llama2_7b"]),
    # An original context of 64 puts wavelengths into all three bands of the llama3 rule at short sequences.
    "llama3_tiny": tiny(PUBLISHED["llama31_8b"], rope_original_max_position_embeddings=64),
}


ARCHITECTURES: dict[str, Architecture] = {
    "llama": like_llama("LlamaForCausalLM", parts=(LLAMA_HEADS, ROPE, tied(False), LLAMA_BIASES)),
}

TABLES: dict[str, Table] = {
    "llama": LLAMA,
}
