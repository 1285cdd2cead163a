"""Seed-OSS."""

import dataclasses

from models.families.base import HEADS, LLAMA, ROPE, like_llama, llama, tiny
from models.hf.block_parts import bias_switches, equal_dropouts
from models.hf.config_parts import tied
from models.hf.keys import Architecture
from models.hf.row_layouts import Table
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


ARCHITECTURES: dict[str, Architecture] = {
    "seed_oss": like_llama(
        "SeedOssForCausalLM",
        defaults={"attention_dropout": 0.1},
        without=("hidden_dropout",),
        parts=(
            HEADS,
            ROPE,
            tied(False),
            bias_switches(
                "attention_bias", out="attention_out_bias", mlp="mlp_bias", defaults={"attention_bias": True}
            ),
            equal_dropouts("residual_dropout", (), 0.1),
        ),
    ),
}

TABLES: dict[str, Table] = {"seed_oss": LLAMA}
