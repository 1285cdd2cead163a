"""SmolLM3."""

import dataclasses
from typing import Any

from models.families.base import LLAMA, LLAMA_BIASES, LLAMA_HEADS, like_llama, llama, tiny
from models.hf.block_parts import count, no_windows, rotary
from models.hf.config_parts import TOKENS, freq, tied
from models.hf.keys import Architecture, Config, Unsupported, is_one_of, pop_number, take_list
from models.hf.row_layouts import Table
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


def read_no_rope(left: Config, fields: dict[str, Any]) -> None:
    """Theirs is 1 for blocks with RoPE. Left out: every no_rope_layer_interval-th block goes without."""
    blocks, every = count(fields), pop_number(left, "no_rope_layer_interval", 4, TOKENS)
    found = take_list(left, "no_rope_layers") or [int((block + 1) % every != 0) for block in range(blocks)]
    if len(found) < blocks or not all(is_one_of(one, (0, 1)) for one in found):
        raise Unsupported("no_rope_layers", found, f"0 or 1 for each of {blocks} blocks")
    without = [not one for one in found[:blocks]]
    fields["no_rope_freq"] = "0" if not any(without) else freq(without)


def write_no_rope(shape: GPTShape) -> Config:
    """As ``read_no_rope``."""
    return {"no_rope_layers": [int(not without) for without in shape.no_rope_blocks], "no_rope_layer_interval": 4}


ARCHITECTURES: dict[str, Architecture] = {
    "smollm3": like_llama(
        "SmolLM3ForCausalLM",
        parts=(
            LLAMA_HEADS,
            rotary(theta=2_000_000.0),
            tied(True),
            LLAMA_BIASES,
            (read_no_rope, write_no_rope),
            no_windows(),
        ),
    ),
}

TABLES: dict[str, Table] = {"smollm3": LLAMA}
