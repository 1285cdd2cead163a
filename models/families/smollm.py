"""SmolLM3."""

import dataclasses

from models.families.base import llama, tiny
from models.shapes import GPTShape

PUBLISHED: dict[str, GPTShape] = {
    # https://huggingface.co/HuggingFaceTB/SmolLM3-3B-Base: every fourth block without RoPE (arXiv:2501.18795)
    "smollm3_3b": dataclasses.replace(
        llama(36, 2048, 11008, 16, 4),
        vocab_size=128256,
        norm_epsilon=1e-6,
        rotary_base=5_000_000,
        max_position_embeddings=65536,
        no_rope_freq="4",
        untie_embeddings_and_output_weights=False,
        hf_model_type="smollm3",
    ),
}

TINY: dict[str, GPTShape] = {"smollm3_tiny": tiny(PUBLISHED["smollm3_3b"])}
