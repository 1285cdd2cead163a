"""Seed-OSS."""

import dataclasses

from models.families.base import llama, tiny
from models.shapes import GPTShape

PUBLISHED: dict[str, GPTShape] = {
    # https://huggingface.co/ByteDance-Seed/Seed-OSS-36B-Base: biases of queries, keys and values only
    "seed_oss_36b": dataclasses.replace(
        llama(64, 5120, 27648, 80, 8),
        kv_channels=128,
        vocab_size=155136,
        norm_epsilon=1e-6,
        add_qkv_bias=True,
        rotary_base=10_000_000,
        max_position_embeddings=524_288,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        hf_model_type="seed_oss",
    ),
}

TINY: dict[str, GPTShape] = {"seed_oss_tiny": tiny(PUBLISHED["seed_oss_36b"])}
