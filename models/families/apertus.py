"""Apertus."""

import dataclasses

from models.families.base import llama, tiny
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
