"""The shape of a published row: its own columns over what the model's name says."""

import csv
import dataclasses
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from models.costs.parameters import active_parameters, block_parameters, num_parameters
from models.costs.sizes import ModelSizes, sizes
from models.families import ALIASES, SHAPES
from models.shapes import GPTShape
from tests.planner.benchmarked import BENCHMARKED, LATENT_EXPERTS

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


# ---- shapes of GPT-2's kind, and of Llama's, from no more than their dimensions
#
# ``dimensions.csv`` has those of models that published tables name and that have no preset, each with its source.


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


# ---- models' names as tables spell them, found among those that are known
#
# "meta-llama/Llama-3.1-405B-Instruct", "llama3.1 405b" and "llama31_405b" are one model: organizations, separators and
# capitals do not count, nor what follows the longest known name. What follows must stand apart from it ("Llama-3-8B" in
# "Llama-3-8B-v0.1", but not "GPT-2" in "GPT-2.7B"), and a size that is given must be about the model's.


OTHER_NAMES = {
    **ALIASES,
    "llama33_70b": "llama31_70b", "llama_8b": "llama31_8b", "llama_405b": "llama31_405b",
    "llama4_17b_16e": "llama4_scout", "llama4_17b_128e": "llama4_maverick",
    "deepseek_r1": "deepseek_v3", "deepseek_v3_1": "deepseek_v3", "deepseek_v3_2": "deepseek_v3",
    "deepseek_v2_5": "deepseek_v2", "gpt_3": "gpt3_175b", "gpt2_1_5b": "gpt2_xl", "bloom": "bloom_176b",
    "mt_nlg": "mt_nlg_530b", "megatron_turing_nlg": "mt_nlg_530b", "nemotron_15b": "nemotron4_15b",
    "nemotron_340b": "nemotron4_340b", "qwen3_vl_235b_a22b": "qwen3_235b_a22b",
    "qwen3_vl_30b_a3b": "qwen3_30b_a3b",
}  # fmt: skip
"""Releases of the same dimensions (a VL's text model), and short names of what comes in one size only."""
ABOUT = 0.3
"""Share by which a given size may differ: "8x7B" is 46.7 billion parameters, "Nemotron 3 Nano 30B" here 35."""


def spelled(text: str) -> str:
    """As names of presets are spelled: llama3_70b."""
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")


@cache
def known() -> Mapping[str, GPTShape]:
    """Every model whose dimensions are known.

    Depths of multi-token prediction are part of a recipe, not of the name: benchmarks leave them out.
    """
    presets = {name: _without_depths(shape) for name, shape in SHAPES.items()}
    return {**dimensions(), **presets, **BENCHMARKED}


def known_as(text: str) -> str | None:
    """The key of ``known`` for a model's name; None where the name is of none of them."""
    exact = spelled(text)
    if found := next((name for name in (exact, OTHER_NAMES.get(exact, "")) if name in known()), None):
        return found
    return _begins(_clean(text))


def billions(text: str) -> float | None:
    """The size that a name tells, in billions of parameters: 70 of "Llama3-70B", 0.125 of "MPT-125m"."""
    found = re.search(r"(?<![\d.])(?:(\d+)x)?(\d+(?:\.\d+)?)\s*([mbt])(?![a-z0-9])", _clean(text))
    if found is None:
        return None
    return float(found[1] or 1) * float(found[2]) * {"m": 1e-3, "b": 1.0, "t": 1e3}[found[3]]


@cache
def _begins(text: str) -> str | None:
    stated = billions(text)
    found = ""
    name = None
    for letters, target in _letters().items():
        longer = len(letters) > len(found) and _prefix(letters, text)
        if longer and (stated is None or _is_size(known()[target], stated)):
            found, name = letters, target
    return name


@cache
def _letters() -> dict[str, str]:
    """Known names without their separators; mixtures without their active size, too: qwen3235b."""
    names = {name: name for name in known()} | OTHER_NAMES
    short = {re.sub(r"_a\d+b$", "", name): target for name, target in names.items()}
    return {name.replace("_", ""): target for name, target in (short | names).items()}


def _prefix(letters: str, text: str) -> bool:
    """Whether a name begins with these letters, and then ends, or has a separator that is no decimal point."""
    place = 0
    for letter in letters:
        while place < len(text) and not text[place].isalnum():
            place += 1
        if place == len(text) or text[place] != letter:
            return False
        place += 1
    rest = text[place:]
    return not rest or not (rest[0].isalnum() or (text[place - 1].isdigit() and re.match(r"\.\d", rest)))


def _clean(text: str) -> str:
    """Without the organization before it and words that make no difference."""
    name = text.strip().rsplit("/", 1)[-1].lower().replace("×", "x")
    name = re.sub(r"(?<![a-z0-9])(meta|moe)(?![a-z0-9])", "", name)
    return re.sub(r"\.0+(?=[mbt]\b)", "", name).strip(" -_")


def _is_size(shape: GPTShape, stated: float) -> bool:
    """All parameters, or those that a token meets."""
    sizes = (num_parameters(shape) / 1e9, active_parameters(shape) / 1e9)
    return any(abs(stated / size - 1) < ABOUT for size in sizes)


def _without_depths(shape: GPTShape) -> GPTShape:
    return replace(shape, mtp_num_layers=0)
