"""The shape of a published row: its own columns over what the model's name says. No torch here."""

import dataclasses
import re
from collections.abc import Mapping

from models.families import ALIASES, SHAPES
from models.parameters import block_parameters, num_parameters
from models.shapes import GPTShape
from models.sizes import ModelSizes, sizes

GATED = ("llama", "qwen", "deepseek", "mixtral", "mistral", "kimi", "gpt_oss", "gemma", "olmo")


def _like(name: str, **changes: object) -> GPTShape:
    return dataclasses.replace(SHAPES[name], **changes)  # type: ignore[arg-type]


# The Nemotron 3: hybrids of state-space layers, layers of experts and few attention layers, as pairs of a mixer and
# experts; what the mixers' projections have more than attention's is in the shared experts' width, so that FLOPs per
# token are those of NVIDIA's tables (Super 85e9, Ultra 363e9, Nano 22e9, Lightning, which is Nano with two depths of
# multi-token prediction, 28e9). Super and Ultra have two as well, and state-space layers twice as wide as attention:
# 8,192 keys. DeepSeek-V4 Flash: what its table computes more (91e9) is in the shared experts, too.
BENCHMARKED: dict[str, GPTShape] = {
    # Architectures that this project does not train, by the config.json of each model card. State-space layers are
    # counted as attention to 4,096 keys: their scans outrun FlashAttention 2 from 2,048 on (arXiv:2405.21060, figure
    # 10), and today's attention is twice as fast. Blocks are halved where a card counts a mixer and an MLP apart.
    "gpt_oss_120b": _like(
        "qwen3_235b_a22b", num_layers=36, hidden_size=2880, ffn_hidden_size=2880, num_attention_heads=64,
        num_query_groups=8, kv_channels=64, vocab_size=201088, num_moe_experts=128, moe_ffn_hidden_size=2880,
        moe_router_topk=4, window_size=(127, 0), window_attn_skip_freq="2", add_bias_linear=True,
    ),
    "kimi_k2": _like(
        "deepseek_v3", num_attention_heads=64, num_query_groups=64, vocab_size=163840, num_moe_experts=384,
        moe_layer_freq="[0]*1+[1]*60", moe_router_num_groups=0, moe_router_group_topk=0, mtp_num_layers=0,
    ),
    "nemotron_3_nano": _like(
        "qwen3_30b_a3b", num_layers=26, hidden_size=2688, num_attention_heads=32, num_query_groups=2,
        vocab_size=131072, activation="squared_relu", num_moe_experts=128, moe_ffn_hidden_size=1856,
        moe_shared_expert_intermediate_size=3712, moe_router_topk=6, window_size=(4095, 0), window_attn_skip_freq="4",
    ),
    "nemotron_3_5_lightning": _like(
        "qwen3_30b_a3b", num_layers=26, hidden_size=2688, num_attention_heads=32, num_query_groups=2,
        vocab_size=131072, activation="squared_relu", num_moe_experts=128, moe_ffn_hidden_size=1856,
        moe_shared_expert_intermediate_size=3712, moe_router_topk=6, window_size=(4095, 0), window_attn_skip_freq="4",
        mtp_num_layers=2,
    ),
    "nemotron_3_super": _like(
        "qwen3_235b_a22b", num_layers=40, hidden_size=4096, num_attention_heads=32, num_query_groups=2,
        vocab_size=131072, activation="squared_relu", num_moe_experts=128, moe_ffn_hidden_size=2496,
        moe_shared_expert_intermediate_size=12736, moe_router_topk=6, window_size=(8191, 0), window_attn_skip_freq="5",
        mtp_num_layers=2,
    ),
    "nemotron_3_ultra": _like(
        "qwen3_235b_a22b", num_layers=48, hidden_size=8192, num_attention_heads=64, num_query_groups=2,
        vocab_size=131072, activation="squared_relu", num_moe_experts=128, moe_ffn_hidden_size=4672,
        moe_shared_expert_intermediate_size=28992, moe_router_topk=6, window_size=(8191, 0), window_attn_skip_freq="5",
        mtp_num_layers=2,
    ),
    "deepseekv4_flash": _like(
        "deepseek_v3", num_layers=43, hidden_size=4096, num_attention_heads=64, num_query_groups=64,
        moe_layer_freq="1", num_moe_experts=256, moe_ffn_hidden_size=2048, moe_shared_expert_intermediate_size=4544,
        moe_router_topk=6, moe_router_num_groups=0, moe_router_group_topk=0, mtp_num_layers=1,
    ),
    "qwen2_57b_a14b": _like(
        "qwen3_30b_a3b", num_layers=28, hidden_size=3584, num_attention_heads=28, num_query_groups=4,
        vocab_size=151936, num_moe_experts=64, moe_ffn_hidden_size=2560,
        moe_shared_expert_intermediate_size=20480, moe_router_topk=8,
    ),
}  # fmt: skip

LATENT_EXPERTS: dict[str, dict[str, int]] = {
    # As they are: many small experts in a space of a quarter of the hidden size.
    "nemotron_3_super": {"experts": 512, "topk": 22, "expert_ffn": 2688, "expert_hidden": 1024},
    "nemotron_3_ultra": {"experts": 512, "topk": 22, "expert_ffn": 5120, "expert_hidden": 2048},
}  # fmt: skip

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


def model_name(row: Mapping[str, str]) -> str:
    """As names of presets are spelled: llama3_70b."""
    return re.sub(r"[^a-z0-9]+", "_", row.get("model", "").lower()).strip("_")


def shape_of(row: Mapping[str, str]) -> GPTShape:
    """A row's shape. Where neither columns nor name tell, a Llama-like one of as many parameters."""
    name = model_name(row)
    base = _named(name)
    given = {field: int(float(row[column])) for column, field in COLUMNS.items() if row.get(column, "").strip()}
    if base is None and "hidden_size" not in given:
        base = _of_size(_billions(row))
    if base is None:
        base = _plain(name)
    elif given.get("num_attention_heads", base.num_attention_heads) != base.num_attention_heads:
        given.setdefault("num_query_groups", given["num_attention_heads"])
    if _predicts_more(name, row):
        base = dataclasses.replace(base, mtp_num_layers=1)
    if "num_layers" in given and given["num_layers"] != base.num_layers and base.num_moe_experts:
        given["moe_layer_freq"] = 1
    changes = {key: str(value) if key == "moe_layer_freq" else value for key, value in given.items()}
    heads = changes.get("num_attention_heads", base.num_attention_heads)
    if base.kv_channels * base.num_attention_heads == base.hidden_size or "_plain" in name:
        changes["kv_channels"] = int(changes.get("hidden_size", base.hidden_size)) // int(heads)
    if "num_query_groups" not in changes and "num_attention_heads" in changes and _named(name) is None:
        changes["num_query_groups"] = heads
    found = dataclasses.replace(base, **changes)  # type: ignore[arg-type]
    return found if _named(name) is not None else _as_large(found, _billions(row))


def _predicts_more(name: str, row: Mapping[str, str]) -> bool:
    """Megatron-Bridge trains DeepSeek-V3 with its depth of multi-token prediction, but for rows that deny it.

    Its tables' FLOPs per token tell: 260e9 with, 249e9 without.
    """
    bridge = "bridge" in row.get("framework", "").lower()
    return name == "deepseek_v3" and bridge and "w/o mtp" not in row.get("notes", "").lower()


def sizes_of(row: Mapping[str, str], shape: GPTShape) -> ModelSizes:
    """Of the row's shape at its sequence length."""
    found = sizes(shape, int(float(row.get("seq_len", "") or 4096)))
    name = model_name(row)
    latent = next((own for known, own in LATENT_EXPERTS.items() if name.startswith(known)), {})
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


def _named(name: str) -> GPTShape | None:
    if name in BENCHMARKED:
        return BENCHMARKED[name]
    if found := next((shape for known, shape in BENCHMARKED.items() if name.startswith(known)), None):
        return found
    shape = SHAPES.get(ALIASES.get(name, name))
    # Depths of multi-token prediction are part of a recipe, not of the name: benchmarks leave them out.
    return None if shape is None else dataclasses.replace(shape, mtp_num_layers=0)


def _plain(name: str) -> GPTShape:
    """GPT-2's kind, or Llama's where the name is of a family with gated MLPs."""
    base = SHAPES["llama3_8b"] if name.startswith(GATED) else SHAPES["gpt3_175b"]
    return dataclasses.replace(base, kv_channels=1, num_attention_heads=1, hidden_size=1)


def _billions(row: Mapping[str, str]) -> float:
    found = re.search(r"(\d+(?:\.\d+)?)\s*[bB](?![a-z])", row.get("model", ""))
    return float(row.get("params_b", "") or (found[1] if found else 8))


def _of_size(billions: float) -> GPTShape:
    """The published Llama nearest in size: hidden and layers scaled by the cube root (arXiv:2001.08361, section 3)."""
    base, known = SHAPES["llama3_70b"], 70.6
    scale = (billions / known) ** (1 / 3)
    heads = max(8, round(base.num_attention_heads * scale / 8) * 8)
    return dataclasses.replace(
        base,
        num_layers=max(2, round(base.num_layers * scale)),
        hidden_size=heads * 128,
        ffn_hidden_size=max(256, round(base.ffn_hidden_size * scale / 256) * 256),
        num_attention_heads=heads,
    )
