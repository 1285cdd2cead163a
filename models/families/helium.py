"""Helium: Llama's blocks, whose RoPE turns neighbouring channels."""

import dataclasses
from typing import Any

from models.families.base import LLAMA, UNBIASED, WIDE_HEADS, like_llama, llama, tiny
from models.hf.block_parts import rotary
from models.hf.config_parts import tied
from models.hf.keys import Architecture, Config, Unsupported
from models.hf.row_layouts import Table
from models.shapes import GPTShape

PUBLISHED: dict[str, GPTShape] = {
    # transformers' HeliumConfig, whose defaults are those of https://huggingface.co/kyutai/helium-1-preview-2b
    "helium_2b": dataclasses.replace(
        llama(24, 2560, 7040, num_attention_heads=20, num_query_groups=20),
        vocab_size=48_000,
        norm_epsilon=1e-8,
        rotary_base=100_000,
        rotary_interleaved=True,
        hf_model_type="helium",
    ),
}

TINY: dict[str, GPTShape] = {"helium_tiny": tiny(PUBLISHED["helium_2b"])}


def _check_heads(left: Config, fields: dict[str, Any]) -> None:
    """Attention's output projection is as wide as the model, whatever heads are."""
    if (width := fields["num_attention_heads"] * fields["kv_channels"]) != fields["hidden_size"]:
        raise Unsupported("head_dim", fields["kv_channels"], f"heads of {fields['hidden_size']} channels, not {width}")


ARCHITECTURES: dict[str, Architecture] = {
    "helium": like_llama(
        "HeliumForCausalLM",
        defaults={"rms_norm_eps": 1e-8},
        switches=UNBIASED | {"mlp_bias": (False,)},
        implied={"rotary_interleaved": True},
        parts=(WIDE_HEADS, (_check_heads, lambda shape: {}), rotary(theta=100_000.0), tied(False)),
    ),
}

TABLES: dict[str, Table] = {"helium": LLAMA}
