"""Names of weights in checkpoints by parameter (PyTorch DCP, DeepSpeed), and which of them a model may have.

A naming is that of transformers' files, from the tables of ``models.hf``, of its modules, or torchtitan's. Since
version 5 transformers' modules have names of their own, and hold the experts of a block in one tensor
(transformers/conversion_mapping.py); until version 4 a module's names are the files'. torchtitan's Llama rotates
neighbouring channels of a head where transformers rotates halves: rows of its queries and keys lie otherwise
(torchtitan/models/llama3/state_dict_adapter.py).
"""

import dataclasses
import re
from collections.abc import Callable, Iterator

from models.hf.shapes import write_config
from models.hf.tables import TABLES, Entry, constants, copies, entries
from models.shapes import GPTShape
from program.errors import UserError
from tools.reshard.named_weights import Geometry, NamedWeight, Names, Naming, NewName, RowRun, renamed

EXPERT = re.compile(r"^(.+)\.(mlp|block_sparse_moe|mixer)\.experts\.(\d+)\.((?:gate|up|down)_proj|w[123])\.weight$")
"""One expert's matrix: what is before, its module, its number, which of its matrices."""
_GATES = ("gate_proj", "w1")
_DOWN = ("down_proj", "w2")

_MODULES: dict[str, tuple[tuple[re.Pattern[str], str], ...]] = {
    "nemotron_h": ((re.compile(r"^backbone\."), "model."),),
    "gpt_neox": ((re.compile(r"^embed_out\."), "lm_head."),),
    "ernie4_5_moe": ((re.compile(r"\.mlp\.moe_statics\."), ".mlp.gate.moe_statics."),),
}
"""By model_type; others' names are the files'."""


def module_name(model_type: str, naming: Naming) -> Callable[[str], NewName]:
    """What calls each tensor of a naming of files as the module does."""
    experts = [match for name in naming.shapes if (match := EXPERT.match(name))]
    is_gated = any(match[4] in _GATES for match in experts)

    def rename(name: str) -> NewName:
        for pattern, new in _MODULES.get(model_type, ()):
            name = pattern.sub(new, name)
        if match := EXPERT.match(name):
            down = match[4] in _DOWN
            part = "all" if down or not is_gated else "first" if match[4] in _GATES else "second"
            stack = "down_proj" if down else "gate_up_proj" if is_gated else "up_proj"
            return f"{match[1]}.{_module(match[2])}.experts.{stack}", (int(match[3]), part)
        return name.replace(".block_sparse_moe.", f".{_module('block_sparse_moe')}."), None

    return rename


def _module(name: str) -> str:
    return "mlp" if name == "block_sparse_moe" else name


ROTATES_NEIGHBOURS = {"llama": True, "qwen3": False, "qwen3_moe": False, "deepseek_v3": False, "mixtral": True}
"""torchtitan's models by the model_type of transformers whose weights are the same, with or without other rows."""

_NAMES = tuple(
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
_EXPERT_PART = {"gate_proj": "w1", "w1": "w1", "up_proj": "w3", "w3": "w3", "down_proj": "w2", "w2": "w2"}
_VERSIONS = tuple(
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


def torchtitan_name(name: str) -> NewName:
    """A name of transformers' as this package spells torchtitan's."""
    if match := EXPERT.match(name):
        layer = match[1].removeprefix("model.")
        return f"{layer}.moe.experts.{_EXPERT_PART[match[4]]}", (int(match[3]), "all")
    for pattern, new in _NAMES:
        name = pattern.sub(new, name)
    return name, None


def newest_torchtitan(name: str, shape: GPTShape) -> str:
    """A name as torchtitan of 2026 has it, which is what is written."""
    if not shape.multi_latent_attention:
        name = re.sub(r"\.attention\.(w[qkv])\.", r".attention.qkv_linear.\1.", name)
    name = re.sub(r"\.moe\.experts\.(w[13])$", r".moe.routed_experts.inner_experts.\1_EFD", name)
    name = re.sub(r"\.moe\.experts\.w2$", ".moe.routed_experts.inner_experts.w2_EDF", name)
    return re.sub(r"\.moe\.expert_bias$", ".moe.expert_bias_E", name)


def without_versions(key: str) -> str:
    """A key as this module spells it, of any version."""
    for pattern, new in _VERSIONS:
        key = pattern.sub(new, key)
    return key


_ROTATED = re.compile(r"\.attention\.w[qk]\.")


def interleaved(naming: Naming, shape: GPTShape) -> Naming:
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


WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module", "module")
"""Segments that wrappers of modules put into names."""


def namings(shape: GPTShape) -> Iterator[Naming]:
    """Those that such a model may have."""
    seen: set[tuple[str, ...]] = set()
    for model_type in (*_own_type(shape), *TABLES):
        try:
            found = list(namings_of(model_type, shape))
        except UserError:
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
    naming = _of_files(model_type, shape, list(entries(model_type, shape)))
    yield naming
    if bare := TABLES[model_type].bare:
        yield renamed(naming, lambda name: (name.removeprefix(bare), None))
    yield renamed(naming, module_name(model_type, naming))
    if (titan := _of_torchtitan(naming, model_type, shape)) is not None:
        yield titan


def written_naming(family: Names, shape: GPTShape) -> Naming:
    """That of the newest version's modules. Raises UserError for a model that they do not have."""
    model_type, _ = write_config(shape)
    naming = _of_files(model_type, shape, list(entries(model_type, shape)))
    if family == "transformers":
        return renamed(naming, module_name(model_type, naming))
    if (titan := _of_torchtitan(naming, model_type, shape)) is None:
        raise UserError(
            f"--names {family}: it has no model like this one, which is transformers' {model_type}. It has those of "
            f"{', '.join(ROTATES_NEIGHBOURS)}. Use --names transformers."
        )
    return titan


def _of_torchtitan(naming: Naming, model_type: str, shape: GPTShape) -> Naming | None:
    if model_type not in ROTATES_NEIGHBOURS:
        return None
    titan = renamed(naming, torchtitan_name, "torchtitan's", "torchtitan")
    turned = ROTATES_NEIGHBOURS[model_type] and not shape.qk_layernorm  # a table may be shared
    return interleaved(titan, shape) if turned else titan


def _of_files(model_type: str, shape: GPTShape, found: list[Entry]) -> Naming:
    weights: list[NamedWeight] = []
    shapes: dict[str, tuple[int, ...]] = {}
    padded: set[str] = set()
    for entry in found:
        runs = tuple(RowRun(strip.name, strip.start, strip.row, strip.rows, strip.step) for strip in entry.strips)
        geometry = Geometry(entry.transposed, entry.vectors, entry.unsqueezed)
        weights.append(NamedWeight(entry.key, entry.shape, runs, entry.padded, geometry))
        shapes |= entry.their_shapes()
        padded |= {strip.name for strip in entry.strips if entry.padded}
    label = f"transformers' {model_type}"
    return Naming(
        label, "transformers", tuple(weights), shapes, tuple(copies(model_type, shape)), padded,
        constants(model_type, shape), TABLES[model_type].computed,
    )  # fmt: skip


def known_name(key: str) -> str:
    """A key without wrappers' segments, and as this package spells torchtitan's names."""
    segments = key.split(".")
    if not set(segments).isdisjoint(WRAPPERS):
        key = ".".join(segment for segment in segments if segment not in WRAPPERS)
    return without_versions(key)
