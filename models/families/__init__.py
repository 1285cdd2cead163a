"""Named architectures, each with its source. A family is a file with two tables: PUBLISHED and TINY."""

import dataclasses
import difflib

from models.families import (
    apertus,
    deepseek,
    ernie,
    ernie_moe,
    gemma,
    glm,
    glm_moe,
    gpt,
    gpt_oss,
    granite,
    kimi,
    llama,
    llama4,
    mamba,
    minimax,
    mistral,
    nemotron,
    nemotron_h,
    neox,
    olmo,
    phi,
    qwen,
    qwen3_next,
    qwen35,
    seed,
    smollm,
    starcoder,
)
from models.families.base import llama as llama_like
from models.shapes import GPTShape
from parallel.errors import UserError

_FAMILIES = (
    gpt,
    llama,
    mistral,
    qwen,
    qwen3_next,
    qwen35,
    deepseek,
    kimi,
    gpt_oss,
    mamba,
    nemotron_h,
    seed,
    smollm,
    starcoder,
    granite,
    phi,
    neox,
    olmo,
    gemma,
    nemotron,
    apertus,
    ernie,
    glm,
    glm_moe,
    minimax,
    ernie_moe,
    llama4,
)

PUBLISHED: dict[str, GPTShape] = {name: shape for family in _FAMILIES for name, shape in family.PUBLISHED.items()}
"""Architectures of models that exist."""

TINY: dict[str, GPTShape] = {name: shape for family in _FAMILIES for name, shape in family.TINY.items()}
"""One sibling of each family that runs on a laptop in seconds."""


def _small_llama(hidden_size: int, ffn_hidden_size: int, vocab_size: int) -> GPTShape:
    """Four Llama-like blocks of four heads in two groups, for laptops; sizes are multiples of 16."""
    return dataclasses.replace(
        llama_like(4, hidden_size, ffn_hidden_size, num_attention_heads=4, num_query_groups=2),
        vocab_size=vocab_size,
        max_position_embeddings=2048,
    )


SHAPES: dict[str, GPTShape] = {
    # Ours, for tests and the demo. Vocabularies: the byte tokenizer's 257; the demo's SentencePiece model's.
    "debug": _small_llama(hidden_size=64, ffn_hidden_size=176, vocab_size=257),
    "demo": _small_llama(hidden_size=128, ffn_hidden_size=352, vocab_size=2048),
    **TINY,
    **PUBLISHED,
}
"""Architectures by name. ``vocab_size`` is the published one; a run replaces it by its tokenizer's."""

ALIASES = {"llama3_1b": "llama32_1b", "llama3_3b": "llama32_3b", "llama3_405b": "llama31_405b"}
"""Sizes that exist in one release only, under the name of the generation."""


def unknown_shape(name: str) -> list[str]:
    """The problem of a name that is in neither table, with the nearest names; empty when it is known."""
    names = [*SHAPES, *ALIASES]
    if name in names:
        return []
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(near)}?" if near else f"There are: {', '.join(sorted(names))}."
    return [f'model.shape "{name}" is unknown. {hint}']


def named(name: str) -> GPTShape:
    """The published shape of this name. Raises UserError with the nearest names."""
    if problems := unknown_shape(name):
        raise UserError(problems[0])
    return SHAPES[ALIASES.get(name, name)]
