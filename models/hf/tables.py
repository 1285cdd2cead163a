"""For each architecture, the tensors of theirs that each of our parameters is made of.

A table has a line for whatever a member of the family may have; which lines count, ``models.parameters`` says. Sources:
the state dicts of transformers 5.23 as ``save_pretrained`` writes them, and the tables of contents of the safetensors
files on the hub, which have the same names but for GPT-2's, whose lack the leading ``transformer.``.
"""

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from models.hf.row_layouts import Rule, Strip, by_group, conv1d, conv1d_by_group, experts, row_count, same, stacked
from models.hf.row_layouts import vocabulary as vocab
from models.names import checkpoint_key
from models.parameters import Parameter, parameters
from models.shapes import GPTShape
from parallel.errors import UserError


@dataclass(slots=True, frozen=True)
class Table:
    """An architecture's names."""

    whole: Mapping[str, Rule]
    """What is there once."""
    block: Mapping[str, Rule]
    """What a block has, without its prefix on either side."""
    prefix: str = "model.layers."
    """Of a block, before its number; those of multi-token prediction follow the model's own."""
    bare: str = ""
    """A prefix that files on the hub may leave out."""
    computed: re.Pattern[str] = re.compile(r"\.rotary_emb\.inv_freq$")
    """Tensors in old files that are no weights: they follow from the configuration."""
    mtp_copies: Mapping[str, str] = field(default_factory=dict)
    """What a block of multi-token prediction holds again: their name, and which of our parameters it is."""


@dataclass(slots=True, frozen=True)
class Entry:
    """One of our parameters, and where its rows are in their tensors."""

    name: str
    """Canonical."""
    key: str
    """In a checkpoint."""
    shape: tuple[int, ...]
    strips: tuple[Strip, ...]
    """By our rows."""
    transposed: bool
    padded: bool
    keeps_dtype: bool
    """A state that is never rounded: the router's bias, which moves by steps that bf16 would lose."""

    @property
    def rows(self) -> int:
        """Our rows."""
        return row_count(self.shape)

    @property
    def columns(self) -> int:
        """Elements of a row."""
        return self.shape[-1] if len(self.shape) > 1 else 1

    def by_their_name(self) -> dict[str, list[Strip]]:
        """The strips of each of their tensors, by its rows."""
        found: dict[str, list[Strip]] = {}
        for strip in self.strips:
            found.setdefault(strip.name, []).append(strip)
        for strips in found.values():
            strips.sort(key=lambda strip: strip.start)
        return found

    def their_shapes(self) -> dict[str, tuple[int, ...]]:
        """Their tensors, each with the shape that it must have."""
        rows: dict[str, int] = {}
        for strip in self.strips:
            rows[strip.name] = rows.get(strip.name, 0) + strip.rows
        if len(self.shape) == 1:
            return {name: (count,) for name, count in rows.items()}
        return {
            name: (self.columns, count) if self.transposed else (count, self.columns) for name, count in rows.items()
        }


LLAMA_WHOLE = {
    "word_embeddings.weight": vocab("model.embed_tokens.weight"),
    "final_layernorm.weight": same("model.norm.weight"),
    "output_layer.weight": vocab("lm_head.weight"),
}

ATTENTION = {
    "self_attention.linear_qkv.layer_norm_weight": same("input_layernorm.weight"),
    "self_attention.linear_qkv.weight": by_group(*(f"self_attn.{kind}_proj.weight" for kind in "qkv")),
    "self_attention.linear_qkv.bias": by_group(*(f"self_attn.{kind}_proj.bias" for kind in "qkv")),
    "self_attention.q_layernorm.weight": same("self_attn.q_norm.weight"),
    "self_attention.k_layernorm.weight": same("self_attn.k_norm.weight"),
    "self_attention.linear_proj.weight": same("self_attn.o_proj.weight"),
}

# No rows change places, although transformers' V2 and V3 and megatron-core pair the rotated channels in different
# orders: each order is the same for queries and keys, so it does not show in their product.
LATENT_ATTENTION = {
    "input_layernorm.weight": same("input_layernorm.weight"),
    "self_attention.linear_q_proj.weight": same("self_attn.q_proj.weight"),
    "self_attention.linear_q_down_proj.weight": same("self_attn.q_a_proj.weight"),
    "self_attention.linear_q_up_proj.layer_norm_weight": same("self_attn.q_a_layernorm.weight"),
    "self_attention.linear_q_up_proj.weight": same("self_attn.q_b_proj.weight"),
    "self_attention.linear_kv_down_proj.weight": same("self_attn.kv_a_proj_with_mqa.weight"),
    "self_attention.linear_kv_up_proj.layer_norm_weight": same("self_attn.kv_a_layernorm.weight"),
    "self_attention.linear_kv_up_proj.weight": same("self_attn.kv_b_proj.weight"),
    "self_attention.linear_proj.weight": same("self_attn.o_proj.weight"),
}

MLP = {
    "mlp.linear_fc1.layer_norm_weight": same("post_attention_layernorm.weight"),
    "mlp.linear_fc1.weight": stacked("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": same("mlp.down_proj.weight"),
}

EXPERTS = {
    "pre_mlp_layernorm.weight": same("post_attention_layernorm.weight"),
    "mlp.router.weight": same("mlp.gate.weight"),
    "mlp.router.expert_bias": same("mlp.gate.e_score_correction_bias"),
    "mlp.experts.linear_fc1.weight": experts(
        "mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"
    ),
    "mlp.experts.linear_fc2.weight": experts("mlp.experts.{expert}.down_proj.weight"),
    "mlp.shared_experts.linear_fc1.weight": stacked(
        "mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"
    ),
    "mlp.shared_experts.linear_fc2.weight": same("mlp.shared_experts.down_proj.weight"),
}

MIXTRAL_EXPERTS = {
    "pre_mlp_layernorm.weight": same("post_attention_layernorm.weight"),
    "mlp.router.weight": same("block_sparse_moe.gate.weight"),
    "mlp.experts.linear_fc1.weight": experts(
        "block_sparse_moe.experts.{expert}.w1.weight", "block_sparse_moe.experts.{expert}.w3.weight"
    ),
    "mlp.experts.linear_fc2.weight": experts("block_sparse_moe.experts.{expert}.w2.weight"),
}

# DeepSeek-V3's README_WEIGHTS.md: the block after the last is that of multi-token prediction; it holds the embedding
# and the output layer once more.
MTP = {
    "enorm.weight": same("enorm.weight"),
    "hnorm.weight": same("hnorm.weight"),
    "eh_proj.weight": same("eh_proj.weight"),
    "final_layernorm.weight": same("shared_head.norm.weight"),
}

GPT2_WHOLE = {
    "word_embeddings.weight": vocab("transformer.wte.weight"),
    "position_embeddings.weight": same("transformer.wpe.weight"),
    "final_layernorm.weight": same("transformer.ln_f.weight"),
    "final_layernorm.bias": same("transformer.ln_f.bias"),
    "output_layer.weight": vocab("lm_head.weight"),
}

GPT2_BLOCK = {
    f"{ours}{part}": rule(f"{theirs}{part}")
    for ours, rule, theirs in (
        ("self_attention.linear_qkv.layer_norm_", same, "ln_1."),
        ("self_attention.linear_qkv.", conv1d_by_group, "attn.c_attn."),
        ("self_attention.linear_proj.", conv1d, "attn.c_proj."),
        ("mlp.linear_fc1.layer_norm_", same, "ln_2."),
        ("mlp.linear_fc1.", conv1d, "mlp.c_fc."),
        ("mlp.linear_fc2.", conv1d, "mlp.c_proj."),
    )
    for part in ("weight", "bias")
}

LLAMA = Table(LLAMA_WHOLE, ATTENTION | MLP)

TABLES: dict[str, Table] = {
    "gpt2": Table(
        GPT2_WHOLE,
        GPT2_BLOCK,
        prefix="transformer.h.",
        bare="transformer.",
        computed=re.compile(r"^transformer\.h\.\d+\.attn\.(bias|masked_bias)$"),
    ),
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "mixtral": Table(LLAMA_WHOLE, ATTENTION | MIXTRAL_EXPERTS),
    "qwen3_moe": Table(LLAMA_WHOLE, ATTENTION | MLP | EXPERTS),
    "deepseek_v2": Table(LLAMA_WHOLE, LATENT_ATTENTION | MLP | EXPERTS),
    "deepseek_v3": Table(
        LLAMA_WHOLE,
        LATENT_ATTENTION | MLP | EXPERTS | MTP,
        mtp_copies={
            "embed_tokens.weight": "word_embeddings.weight",
            "shared_head.head.weight": "output_layer.weight",
        },
    ),
}
"""By transformers' ``model_type``."""


def entries(model_type: str, shape: GPTShape) -> Iterator[Entry]:
    """Every parameter of ``shape``, and the routers' biases, once.

    Raises UserError for a parameter that no model of this type has.
    """
    for parameter in itertools.chain(parameters(shape), _expert_biases(shape)):
        yield _entry(TABLES[model_type], parameter, shape, model_type)


def copies(model_type: str, shape: GPTShape) -> dict[str, str]:
    """Tensors that their files may hold although they are others' equals: their names, and our parameter's."""
    table, found = TABLES[model_type], {}
    if shape.tied:
        found[table.whole["output_layer.weight"].names[0]] = "word_embeddings.weight"
    for depth in range(shape.mtp_num_layers):
        for name, ours in table.mtp_copies.items():
            equal = "word_embeddings.weight" if shape.tied else ours
            found[f"{table.prefix}{shape.num_layers + depth}.{name}"] = equal
    return found


def is_computed(model_type: str, name: str) -> bool:
    """Whether a tensor of theirs is no weight."""
    return TABLES[model_type].computed.search(name) is not None


def full_name(model_type: str, name: str) -> str:
    """A tensor's name with the prefix that its file may have left out."""
    table = TABLES[model_type]
    whole = name.startswith(table.bare) or name in (table.whole["output_layer.weight"].names)
    return name if whole else table.bare + name


def mtp_blocks(model_type: str, shape: GPTShape) -> tuple[str, ...]:
    """What the names of their tensors for multi-token prediction begin with, by depth."""
    first = shape.num_layers
    return tuple(f"{TABLES[model_type].prefix}{first + depth}." for depth in range(shape.mtp_num_layers))


def _expert_biases(shape: GPTShape) -> Iterator[Parameter]:
    """No parameters, but theirs are in the files: [E] for each block with a router."""
    if not shape.moe_router_enable_expert_bias:
        return
    for block in (block for block, moe in enumerate(shape.moe_blocks) if moe):
        yield Parameter(f"layers.{block}.mlp.router.expert_bias", (shape.num_moe_experts,))
    for depth in range(shape.mtp_num_layers if shape.moe_blocks[-1] else 0):
        yield Parameter(f"mtp.{depth}.mlp.router.expert_bias", (shape.num_moe_experts,))


def _entry(table: Table, parameter: Parameter, shape: GPTShape, model_type: str) -> Entry:
    kind, _, rest = parameter.name.partition(".")
    prefix, rules = "", table.whole
    if kind in ("layers", "mtp"):
        number, _, rest = rest.partition(".")
        prefix = f"{table.prefix}{int(number) + (shape.num_layers if kind == 'mtp' else 0)}."
        rules = table.block
    rule = rules.get(rest if prefix else parameter.name)
    if rule is None:
        raise UserError(f"{parameter.name}: transformers' {model_type} has no such parameter.")
    names = tuple(prefix + name for name in rule.names)
    strips = sorted(rule.strips(names, parameter.shape, shape), key=lambda strip: strip.row)
    return Entry(
        name=parameter.name,
        key=checkpoint_key(parameter.name),
        shape=parameter.shape,
        strips=tuple(strips),
        transposed=rule.transposed and len(parameter.shape) == 2,
        padded=rule.padded,
        keeps_dtype=rest.endswith("router.expert_bias"),
    )
