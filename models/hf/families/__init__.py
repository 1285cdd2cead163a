"""Each model_type of transformers: how its config.json is read and written, and what its tensors are called."""

from models.hf.families import (
    apertus,
    deepseek,
    ernie,
    ernie_moe,
    gemma,
    glm,
    glm_moe,
    gpt2,
    gpt_oss,
    granite,
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
from models.hf.keys import Architecture
from models.hf.table import Table

_FAMILIES = (
    llama,
    mistral,
    qwen,
    qwen3_next,
    qwen35,
    deepseek,
    gpt2,
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

ARCHITECTURES: dict[str, Architecture] = {k: v for family in _FAMILIES for k, v in family.ARCHITECTURES.items()}
"""By transformers' ``model_type``. Sources: its configuration classes (5.23) and the published config.json files."""

TABLES: dict[str, Table] = {k: v for family in _FAMILIES for k, v in family.TABLES.items()}
"""By transformers' ``model_type``.

A table has a line for whatever a member of the family may have; which lines count, ``models.costs.parameters`` says.
Sources: the state dicts of transformers 5.23 as ``save_pretrained`` writes them, and the tables of contents of the
safetensors files on the hub, which have the same names but for GPT-2's, whose lack the leading ``transformer.``.
"""
