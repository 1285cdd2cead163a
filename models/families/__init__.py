"""Named architectures, each with its source. A family is one file of this folder, found by its being there:

PUBLISHED: shapes of models that exist, by our name. TINY: siblings that run on a laptop in seconds. ARCHITECTURES: how
its config.json is read and written, and TABLES: what its tensors are called, by transformers' ``model_type``.
"""

import dataclasses
import difflib
import importlib
import pkgutil
from typing import Any

from models.families.base import llama as llama_like
from models.hf.keys import Architecture
from models.hf.row_layouts import Table
from models.shapes import GPTShape
from program.errors import UserError

_FAMILIES = [importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]


def _of_all(table: str) -> dict[str, Any]:
    """The families' tables of this name in one. Two may not have the same key."""
    found: dict[str, Any] = {}
    for family in _FAMILIES:
        entries = getattr(family, table, {})
        assert not found.keys() & entries.keys(), f"{family.__name__}.{table} has another family's names"
        found |= entries
    return found


PUBLISHED: dict[str, GPTShape] = _of_all("PUBLISHED")
"""Architectures of models that exist."""

TINY: dict[str, GPTShape] = _of_all("TINY")
"""One sibling of each family that runs on a laptop in seconds."""

ARCHITECTURES: dict[str, Architecture] = _of_all("ARCHITECTURES")
"""By transformers' ``model_type``; of several that say the same, an export writes the first. Sources: its configuration
classes (5.23) and the published config.json files."""

TABLES: dict[str, Table] = _of_all("TABLES")
"""By transformers' ``model_type``.

A table has a line for whatever a member of the family may have; which lines count, ``models.costs.parameters`` says.
Sources: the state dicts of transformers 5.23 as ``save_pretrained`` writes them, and the tables of contents of the
safetensors files on the hub, which have the same names but for GPT-2's, whose lack the leading ``transformer.``.
"""


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
