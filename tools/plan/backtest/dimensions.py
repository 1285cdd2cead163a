"""Shapes of GPT-2's kind, and of Llama's, from no more than their dimensions.

``dimensions.csv`` has those of models that published tables name and that have no preset, each with its source.
"""

import csv
import dataclasses
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from models.families import SHAPES
from models.shapes import GPTShape

DIMENSIONS = Path(__file__).with_name("dimensions.csv")
GATED = (
    "llama", "codellama", "qwen", "deepseek", "mixtral", "mistral", "kimi", "gpt_oss", "gemma", "olmo", "grok", "yi_",
)  # fmt: skip
"""Families with gated MLPs and Llama's other habits, as their names begin."""
COLUMNS = {
    "layers": "num_layers",
    "hidden": "hidden_size",
    "ffn_hidden": "ffn_hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_query_groups",
    "vocab": "vocab_size",
    "experts": "num_moe_experts",
    "topk": "moe_router_topk",
    "moe_ffn": "moe_ffn_hidden_size",
}


@cache
def dimensions() -> Mapping[str, GPTShape]:
    """Of the file, by name."""
    with DIMENSIONS.open(newline="") as file:
        return {line["model"]: of_kind(line["model"], given(line)) for line in csv.DictReader(file)}


def given(row: Mapping[str, str]) -> dict[str, int]:
    """The dimensions that a row's own columns tell."""
    return {field: int(float(row[column])) for column, field in COLUMNS.items() if row.get(column, "").strip()}


def of_kind(name: str, stated: Mapping[str, int]) -> GPTShape:
    """GPT-2's kind, or Llama's where the name is of such a family; the rest as in most models of the kind.

    That is heads of 128 channels, as many keys as queries, and an MLP four times as wide as the hidden size, or, with
    a gate, 8/3 times (arXiv:2002.05202, section 3).
    """
    base = SHAPES["llama3_8b"] if name.startswith(GATED) else SHAPES["gpt3_175b"]
    hidden = stated["hidden_size"]
    heads = stated.get("num_attention_heads", max(1, hidden // 128))
    wide = -(-8 * hidden // 3 // 256) * 256 if base.gated else 4 * hidden
    usual = {"ffn_hidden_size": wide, "num_attention_heads": heads, "num_query_groups": heads}
    return dataclasses.replace(base, **usual | dict(stated), kv_channels=hidden // heads)  # type: ignore[arg-type]
