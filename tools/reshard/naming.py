"""Names of weights in checkpoints by parameter (PyTorch DCP, DeepSpeed), and which of them a checkpoint has.

A naming is that of transformers' modules, from the tables of ``models.hf``, or torchtitan's. torchtitan's Llama rotates
neighbouring channels of a head where transformers rotates halves: rows of its queries and keys lie otherwise
(torchtitan/models/llama3/state_dict_adapter.py).
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from models.hf.shapes import write_config
from models.hf.tables import TABLES, Entry, copies, entries
from models.shapes import GPTShape
from parallel.errors import UserError

Names = Literal["transformers", "torchtitan"]
WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module", "module")
"""Segments that wrappers of modules put into names."""


@dataclass(slots=True, frozen=True)
class RowRun:
    """Rows of one of their tensors, and where they lie in ours."""

    name: str
    """Theirs."""
    start: int
    """First row in theirs, counted over all dims but the last."""
    row: int
    """First row in ours."""
    rows: int
    step: int = 1
    """Rows in theirs from one to the next."""


@dataclass(slots=True, frozen=True)
class Geometry:
    """How rows lie in their tensors: the last dim's opposite, unless this says otherwise."""

    transposed: bool = False
    """They are columns: [columns, rows], or [experts, columns, rows]."""
    vectors: bool = False
    """Ours is [experts, rows]: each element is a row."""
    unsqueezed: int | None = None
    """They have one more dim, of 1, at this place."""


PLAIN = Geometry()


@dataclass(slots=True, frozen=True)
class NamedWeight:
    """One of our weights, by their names."""

    key: str
    """Ours."""
    shape: tuple[int, ...]
    runs: tuple[RowRun, ...]
    """By our rows."""
    padded: bool
    """Ours ends with rows of padding."""
    geometry: "Geometry"


@dataclass(frozen=True)
class Naming:
    """All weights of a model by their names."""

    label: str
    family: Names
    weights: tuple[NamedWeight, ...]
    shapes: Mapping[str, tuple[int, ...]]
    """Of their tensors."""
    copies: Collection[str] = ()
    """Names of tensors that are others' equals: a tied output layer's."""
    padded: Collection[str] = field(default_factory=set)
    """Names of tensors that may have more rows: the vocabulary, rounded up."""


def namings(shape: GPTShape) -> Iterator[Naming]:
    """Those that such a model may have."""
    seen: set[tuple[str, ...]] = set()
    for model_type in (*_own_type(shape), *TABLES):
        try:
            found = list(namings_of(model_type, shape))
        except (UserError, KeyError, NotImplementedError):
            continue  # no model of this type has such parameters
        for each in found:
            names = tuple(sorted(each.shapes))
            if names not in seen:
                seen.add(names)
                yield each


def _own_type(shape: GPTShape) -> list[str]:
    """The model_type that such a model is exported as: of equal names, its rows count."""
    try:
        return [write_config(shape)[0]]
    except (UserError, KeyError, ValueError):
        return []


def namings_of(model_type: str, shape: GPTShape) -> Iterator[Naming]:
    """Those of one model_type. Raises UserError for a parameter that it does not have."""
    naming = _of_transformers(model_type, shape, list(entries(model_type, shape)))
    yield naming
    yield from _variants(naming, model_type, shape)


_KNOWN_OF_ENTRIES = frozenset("name key shape strips transposed unsqueezed padded keeps_dtype all_experts".split())
"""What a table may say of a weight. Whoever adds to it, has to say here what it means for rows."""


def _of_transformers(model_type: str, shape: GPTShape, found: list[Entry]) -> Naming:
    weights: list[NamedWeight] = []
    shapes: dict[str, tuple[int, ...]] = {}
    padded: set[str] = set()
    for entry in found:
        if unknown := [each.name for each in dataclasses.fields(entry) if each.name not in _KNOWN_OF_ENTRIES]:
            raise NotImplementedError(f"{entry.name}: {unknown[0]}: not known here")
        runs = tuple(RowRun(strip.name, strip.start, strip.row, strip.rows, strip.step) for strip in entry.strips)
        geometry = Geometry(entry.transposed, entry.vectors, entry.unsqueezed)
        weights.append(NamedWeight(entry.key, entry.shape, runs, entry.padded, geometry))
        shapes |= entry.their_shapes()
        padded |= {strip.name for strip in entry.strips if entry.padded}
    label = f"transformers' {model_type}"
    return Naming(label, "transformers", tuple(weights), shapes, tuple(copies(model_type, shape)), padded)


def _variants(naming: Naming, model_type: str, shape: GPTShape) -> Iterator[Naming]:
    if bare := TABLES[model_type].bare:
        yield _renamed(naming, lambda name: (name.removeprefix(bare), None))
    if shape.num_moe_experts:
        yield _renamed(naming, _stacked_experts)
    if model_type in _ROTATES_NEIGHBOURS:
        titan = _renamed(naming, _torchtitan, "torchtitan's", "torchtitan")
        turned = _ROTATES_NEIGHBOURS[model_type] and not shape.qk_layernorm  # a table may be shared
        yield _interleaved(titan, shape) if turned else titan


NewName = tuple[str, tuple[int, str] | None]
"""A name; and of one expert's matrix its number and which part of the stack's rows it is."""
_EXPERT = re.compile(r"^(.+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.((?:gate|up|down)_proj|w[123])\.weight$")
_PARTS = {"gate_proj": "first", "w1": "first", "up_proj": "second", "w3": "second", "down_proj": "all", "w2": "all"}


def _stacked_experts(name: str) -> NewName:
    """transformers' modules hold all experts in one tensor, since version 5, whatever its files say."""
    if match := _EXPERT.match(name):
        part = _PARTS[match[3]]
        return f"{match[1]}.mlp.experts.{'down_proj' if part == 'all' else 'gate_up_proj'}", (int(match[2]), part)
    return name.replace(".block_sparse_moe.", ".mlp."), None


_ROTATES_NEIGHBOURS = {"llama": True, "qwen3": False, "qwen3_moe": False, "deepseek_v3": False, "mixtral": True}
"""torchtitan's models by the model_type of transformers whose weights are the same, with or without other rows."""

_TITAN = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"^model\.embed_tokens\.", "tok_embeddings."),
        (r"^model\.norm\.", "norm."),
        (r"^model\.layers\.", "layers."),
        (r"\.self_attn\.([qkv])_proj\.", r".attention.w\1."),
        (r"\.self_attn\.o_proj\.", ".attention.wo."),
        (r"\.self_attn\.kv_a_proj_with_mqa\.", ".attention.wkv_a."),
        (r"\.self_attn\.kv_a_layernorm\.", ".attention.kv_norm."),
        (r"\.self_attn\.kv_b_proj\.", ".attention.wkv_b."),
        (r"\.self_attn\.q_a_proj\.", ".attention.wq_a."),
        (r"\.self_attn\.q_a_layernorm\.", ".attention.q_norm."),
        (r"\.self_attn\.q_b_proj\.", ".attention.wq_b."),
        (r"\.self_attn\.([qk])_norm\.", r".attention.\1_norm."),
        (r"\.(?:mlp|block_sparse_moe)\.gate\.weight$", ".moe.router.gate.weight"),
        (r"\.mlp\.gate\.e_score_correction_bias$", ".moe.expert_bias"),
        (r"\.mlp\.shared_experts\.gate_proj\.", ".moe.shared_experts.w1."),
        (r"\.mlp\.shared_experts\.up_proj\.", ".moe.shared_experts.w3."),
        (r"\.mlp\.shared_experts\.down_proj\.", ".moe.shared_experts.w2."),
        (r"\.mlp\.gate_proj\.", ".feed_forward.w1."),
        (r"\.mlp\.up_proj\.", ".feed_forward.w3."),
        (r"\.mlp\.down_proj\.", ".feed_forward.w2."),
        (r"\.input_layernorm\.", ".attention_norm."),
        (r"\.post_attention_layernorm\.", ".ffn_norm."),
    )
)
_TITAN_EXPERT = {"gate_proj": "w1", "w1": "w1", "up_proj": "w3", "w3": "w3", "down_proj": "w2", "w2": "w2"}
_TITAN_OTHER = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\.attention\.qkv_linear\.w", ".attention.w"),
        (r"(^|\.)output\.weight$", r"\1lm_head.weight"),
        (r"\.moe\.(?:routed_experts\.)?(?:inner_experts|experts)\.(w[123])(?:_EFD|_EDF)?$", r".moe.experts.\1"),
        (r"\.moe\.shared_expert\.", ".moe.shared_experts."),
        (r"\.moe\.expert_bias_E$", ".moe.expert_bias"),
    )
)
"""Names of other versions of torchtitan."""


def _torchtitan(name: str) -> NewName:
    if match := _EXPERT.match(name):
        layer = match[1].removeprefix("model.")
        return f"{layer}.moe.experts.{_TITAN_EXPERT[match[3]]}", (int(match[2]), "all")
    for pattern, new in _TITAN:
        name = pattern.sub(new, name)
    return name, None


def newest_torchtitan(name: str, shape: GPTShape) -> str:
    """A name as torchtitan of 2026 has it, which is what is written."""
    if not shape.multi_latent_attention:
        name = re.sub(r"\.attention\.(w[qkv])\.", r".attention.qkv_linear.\1.", name)
    name = re.sub(r"\.moe\.experts\.(w[13])$", r".moe.routed_experts.inner_experts.\1_EFD", name)
    name = re.sub(r"\.moe\.experts\.w2$", ".moe.routed_experts.inner_experts.w2_EDF", name)
    return re.sub(r"\.moe\.expert_bias$", ".moe.expert_bias_E", name)


def known_name(key: str) -> str:
    """A key without wrappers' segments, and as this module spells torchtitan's names."""
    segments = key.split(".")
    if not set(segments).isdisjoint(WRAPPERS):
        key = ".".join(segment for segment in segments if segment not in WRAPPERS)
    return _without_versions(key)


def _without_versions(key: str) -> str:
    for pattern, new in _TITAN_OTHER:
        key = pattern.sub(new, key)
    return key


def _renamed(naming: Naming, rename: Callable[[str], NewName], label: str = "", family: Names | None = None) -> Naming:
    """By other names; of experts, matrices that are stacked: [experts, rows, columns]."""
    shapes: dict[str, tuple[int, ...]] = {}
    numbers: dict[str, int] = {}
    for name, shape in naming.shapes.items():
        new, expert = rename(name)
        if expert is None:
            shapes[new] = shape
            continue
        numbers[new] = max(numbers.get(new, 0), expert[0] + 1)
        rows = shape[0] if expert[1] == "all" else 2 * shape[0]
        shapes[new] = (numbers[new], rows, *shape[1:])
    weights = []
    for weight in naming.weights:
        runs = []
        for run in weight.runs:
            new, expert = rename(run.name)
            first = 0
            if expert is not None:
                rows = shapes[new][1]
                first = expert[0] * rows + (rows // 2 if expert[1] == "second" else 0)
            runs.append(dataclasses.replace(run, name=new, start=first + run.start))
        weights.append(dataclasses.replace(weight, runs=tuple(runs)))
    return Naming(
        label or naming.label, family or naming.family, tuple(weights), shapes,
        tuple(rename(name)[0] for name in naming.copies), {rename(name)[0] for name in naming.padded},
    )  # fmt: skip


_ROTATED = re.compile(r"\.attention\.w[qk]\.")


def _interleaved(naming: Naming, shape: GPTShape) -> Naming:
    """Channel i of a head's first half is theirs at 2 i, of its second at 2 i + 1."""
    channels, half = shape.kv_channels, shape.kv_channels // 2
    weights = []
    for weight in naming.weights:
        runs: list[RowRun] = []
        for run in weight.runs:
            if not _ROTATED.search(run.name):
                runs.append(run)
                continue
            runs += [
                RowRun(run.name, run.start + head + part, run.row + head + part * half, half, step=2)
                for head in range(0, run.rows, channels)
                for part in (0, 1)
            ]
        weights.append(dataclasses.replace(weight, runs=tuple(runs)))
    return dataclasses.replace(naming, weights=tuple(weights))


__all__ = [
    "PLAIN",
    "Geometry",
    "NamedWeight",
    "Naming",
    "RowRun",
    "known_name",
    "namings",
    "namings_of",
    "newest_torchtitan",
]
