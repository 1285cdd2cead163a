"""ERNIE-4.5, dense."""

import dataclasses

from models.families.base import llama, tiny
from models.shapes import GPTShape

PUBLISHED: dict[str, GPTShape] = {
    # https://huggingface.co/baidu/ERNIE-4.5-0.3B-Base-PT: RoPE turns neighbouring channels
    "ernie45_0_3b": dataclasses.replace(
        llama(18, 1024, 3072, 16, 2),
        kv_channels=128,
        vocab_size=103_424,
        rotary_base=500_000,
        rotary_interleaved=True,
        max_position_embeddings=131_072,
        untie_embeddings_and_output_weights=False,
        hf_model_type="ernie4_5",
    ),
}

TINY: dict[str, GPTShape] = {"ernie45_tiny": tiny(PUBLISHED["ernie45_0_3b"])}
