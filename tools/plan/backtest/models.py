"""The shape of a published row: its own columns over what the model's name says."""

import dataclasses
from collections.abc import Mapping

from models.families import SHAPES
from models.parameters import block_parameters, num_parameters
from models.shapes import GPTShape
from models.sizes import ModelSizes, sizes
from tools.plan.backtest.benchmarked import LATENT_EXPERTS
from tools.plan.backtest.dimensions import GATED, given, of_kind
from tools.plan.backtest.names import billions, known, known_as, spelled

UNTOLD_BILLIONS = 8.0
"""Of a model that tells neither its name nor its size: it is unknown, and every row gets a prediction."""
OF_GPT_KIND = ("gpt", "mpt", "opt", "bloom", "megatron", "mt_nlg", "turing", "nemotron", "falcon")
"""Families whose MLPs have no gate, as their names begin. Unknown names count as Llama's kind, as most are."""


def model_name(row: Mapping[str, str]) -> str:
    """The name that the model is known by; of an unknown one its own, spelled as names of presets are."""
    text = row.get("model", "")
    return known_as(text) or spelled(text)


def guessed(row: Mapping[str, str]) -> str:
    """What is guessed of a row whose model is not known and whose columns leave dimensions out; empty elsewhere."""
    stated = given(row)
    if known_as(row.get("model", "")) or {"hidden_size", "num_layers"} <= stated.keys():
        return ""
    size = _told_billions(row)
    name = row.get("model", "").strip() or "without a name"
    return f"{name} ({size:g} B)" if size else f"{name} (no size given: {UNTOLD_BILLIONS:g} B)"


def shape_of(row: Mapping[str, str]) -> GPTShape:
    """A row's shape. Where neither columns nor name tell, one of its kind with as many parameters."""
    name, stated = model_name(row), given(row)
    if name not in known():
        return _unknown(row, name, stated)
    base = known()[name]
    if _predicts_more(name, row):
        base = dataclasses.replace(base, mtp_num_layers=1)
    if stated.get("num_layers", base.num_layers) != base.num_layers and base.num_moe_experts:
        base = dataclasses.replace(base, moe_layer_freq="1")
    return _changed(base, stated)


def _changed(base: GPTShape, stated: Mapping[str, int]) -> GPTShape:
    """A known architecture at a row's own dimensions; what the row leaves out goes with the hidden size."""
    changes, hidden = dict(stated), stated.get("hidden_size", base.hidden_size)
    of_hidden = base.kv_channels * base.num_attention_heads == base.hidden_size
    if hidden != base.hidden_size:
        changes.setdefault("ffn_hidden_size", base.ffn_hidden_size * hidden // base.hidden_size)
        changes.setdefault("num_attention_heads", max(1, base.num_attention_heads * hidden // base.hidden_size))
    heads = changes.get("num_attention_heads", base.num_attention_heads)
    if heads != base.num_attention_heads:
        changes.setdefault("num_query_groups", heads)
    if of_hidden:
        changes["kv_channels"] = hidden // heads
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def _unknown(row: Mapping[str, str], name: str, stated: dict[str, int]) -> GPTShape:
    size = _told_billions(row)
    if "hidden_size" not in stated:
        found = _changed(_of_size(name, size or UNTOLD_BILLIONS), stated)
        return _as_large(found, size or UNTOLD_BILLIONS)
    found = of_kind(name, stated)
    # Layers that a row tells are its own: a size in its name is a round one ("MPT-1b" has 1.3 billion).
    wanted = float(row.get("params_b", "") or 0) if "num_layers" in stated else size
    return _as_large(found, wanted) if wanted else found


def _predicts_more(name: str, row: Mapping[str, str]) -> bool:
    """Megatron-Bridge trains DeepSeek-V3 with its depth of multi-token prediction, but for rows that deny it.

    Its tables' FLOPs per token tell: 260e9 with, 249e9 without.
    """
    bridge = "bridge" in row.get("framework", "").lower()
    return name == "deepseek_v3" and bridge and "w/o mtp" not in row.get("notes", "").lower()


def sizes_of(row: Mapping[str, str], shape: GPTShape) -> ModelSizes:
    """Of the row's shape at its sequence length."""
    found = sizes(shape, int(float(row.get("seq_len", "") or 4096)))
    latent = LATENT_EXPERTS.get(model_name(row), {})
    return dataclasses.replace(found, **latent)  # type: ignore[arg-type]


def _as_large(shape: GPTShape, billions: float) -> GPTShape:
    """As many layers as the published size implies, where it and the columns are further apart than tables can be.

    Tables of embeddings, tied or not, with positions or not, explain the rest.
    """
    missing = billions * 1e9 - num_parameters(shape)
    tables = (shape.vocab_size + shape.max_position_embeddings) * shape.hidden_size
    if abs(missing) < max(0.05 * billions * 1e9, 2 * tables):
        return shape
    layer = sum(parameter.size for parameter in block_parameters(shape, shape.num_layers - 1))
    return dataclasses.replace(shape, num_layers=max(1, shape.num_layers + round(missing / layer)))


def _told_billions(row: Mapping[str, str]) -> float | None:
    return float(row.get("params_b", "") or 0) or billions(row.get("model", ""))


def _of_size(name: str, size: float) -> GPTShape:
    """The largest of its kind, hidden and layers scaled by the cube root (arXiv:2001.08361, section 3)."""
    gpt = name.startswith(OF_GPT_KIND) and not name.startswith(GATED)
    base, published = (SHAPES["gpt3_175b"], 174.6) if gpt else (SHAPES["llama3_70b"], 70.6)
    scale = (size / published) ** (1 / 3)
    heads = max(8, round(base.num_attention_heads * scale / 8) * 8)
    return dataclasses.replace(
        base,
        num_layers=max(2, round(base.num_layers * scale)),
        hidden_size=heads * 128,
        ffn_hidden_size=4 * heads * 128 if gpt else max(256, round(base.ffn_hidden_size * scale / 256) * 256),
        num_attention_heads=heads,
        num_query_groups=heads if gpt else base.num_query_groups,
    )
