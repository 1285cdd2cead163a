"""Names in Megatron's ``mp_rank`` files -> Triplane's keys: old and new names, one rank's layers and experts.

Old: Megatron-LM's own model before megatron-core (language_model.encoder.layers.0.self_attention.query_key_value).
New: megatron-core's GPTModel and HybridModel, of local modules or Transformer Engine's.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from models.names import checkpoint_key
from tools.reshard.torch_file import StridedView

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
_MTP = re.compile(r"^mtp\.layers\.(\d+)\.(?:transformer_layer\.|mtp_model_layer\.(?:layers\.\d+\.)?)?(.+)$")
_LOCAL_EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12]\.weight)$")
_GROUPED_EXPERT = re.compile(r"^mlp\.experts\.(linear_fc[12]\.weight)(\d+)$")
NO_WEIGHTS = re.compile(
    r"(_extra_state|inv_freq|local_tokens_per_expert|tokens_per_expert|attention\.masked_bias|attention\.bias"
    r"|\.inv_freq|rotary_pos_emb\..*|global_tokens_per_expert|ga_steps)$"
)
"""Of modules, but no weights."""

_PREFIX = re.compile(r"^(?:module\.|model\.)*")
_OLD_WHOLE = (
    (re.compile(r"^language_model\.embedding\."), "embedding."),
    (re.compile(r"^language_model\.(?:encoder|transformer)\.layers\."), "decoder.layers."),
    (re.compile(r"^language_model\.(?:encoder|transformer)\.final_(?:layernorm|norm)\."), "decoder.final_norm."),
    (re.compile(r"^language_model\.output_layer\."), "output_layer."),
    (re.compile(r"^decoder\.final_layernorm\."), "decoder.final_norm."),
    (re.compile(r"^(?:word_embeddings_for_head|word_embeddings)\."), "output_layer."),
)
_OLD_REST = (
    (re.compile(r"^(?:self_)?attention\.query_key_value\."), "self_attention.linear_qkv."),
    (re.compile(r"^(?:self_)?attention\.dense\."), "self_attention.linear_proj."),
    (re.compile(r"^input_norm\."), "input_layernorm."),
    (re.compile(r"^(?:post_attention_layernorm|post_attention_norm)\."), "pre_mlp_layernorm."),
    (re.compile(r"^mlp\.dense_h_to_4h\."), "mlp.linear_fc1."),
    (re.compile(r"^mlp\.dense_4h_to_h\."), "mlp.linear_fc2."),
)
_OTHER_NAMES = (
    (re.compile(r"^input_layernorm\."), "self_attention.linear_qkv.layer_norm_"),
    (re.compile(r"^pre_mlp_layernorm\."), "mlp.linear_fc1.layer_norm_"),
    (re.compile(r"^mlp\.linear_fc1\.layer_norm_"), "pre_mlp_layernorm."),
    (re.compile(r"^self_attention\.q_layernorm\."), "self_attention.linear_q_up_proj.layer_norm_"),
    (re.compile(r"^self_attention\.kv_layernorm\."), "self_attention.linear_kv_up_proj.layer_norm_"),
    (re.compile(r"^self_attention\.kv_a_layernorm\."), "self_attention.linear_kv_up_proj.layer_norm_"),
)
"""Norms that stand alone or are part of the module behind them: whichever the model has."""


@dataclass(slots=True, frozen=True)
class RankTensor:
    """A tensor of one rank's file."""

    key: str
    """Ours."""
    expert: int | None
    """Among the rank's own experts."""
    view: StridedView
    is_old: bool
    """By a name of before megatron-core."""


def flattened(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Entries of nested dicts under dotted names."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from flattened(each, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


def weights_of(model: Any) -> dict[str, tuple[StridedView, bool]]:
    """The tensors of one model chunk by megatron-core's names, and whether they had old ones; numbers are its own."""
    found = {}
    for key, value in flattened(model):
        if not isinstance(value, StridedView) or NO_WEIGHTS.search(key):
            continue
        old = name = _PREFIX.sub("", key)
        for pattern, new in _OLD_WHOLE:
            name = pattern.sub(new, name)
        if match := _LAYER.match(name):
            rest = match[2]
            for pattern, new in _OLD_REST:
                rest = pattern.sub(new, rest)
            name = f"decoder.layers.{match[1]}.{rest}"
        found[name] = (value, old.startswith("language_model."))
    return found


def layer_count(names: Collection[str]) -> int:
    """Layers of a model chunk."""
    return 1 + max((int(match[1]) for match in map(_LAYER.match, names) if match), default=-1)


def ours(
    name: str, view: StridedView, is_old: bool, first_layer: int, by_sublayer: bool, known: Collection[str]
) -> Iterator[RankTensor]:
    """A tensor by our keys: one, or one for each expert of a grouped matrix. Raises KeyError for none of the model's.

    first_layer: of the chunk, in the whole model. by_sublayer: HybridModel's layers, two a block. known: our keys.
    """
    if match := _LAYER.match(name):
        number = int(match[1]) + first_layer
        prefix, rest = f"layers.{number // 2 if by_sublayer else number}.", match[2]
    elif match := _MTP.match(name):
        prefix, rest = f"mtp.{match[1]}.", match[2]
    elif name in known:
        yield RankTensor(name, None, view, is_old)
        return
    else:
        raise KeyError(name)
    for tail, expert, part in _experts(rest, view):
        yield RankTensor(_known_key(prefix, tail, known), expert, part, is_old)


def _experts(rest: str, view: StridedView) -> Iterator[tuple[str, int | None, StridedView]]:
    if match := _LOCAL_EXPERT.match(rest):
        yield f"mlp.experts.{match[2]}", int(match[1]), view
    elif match := _GROUPED_EXPERT.match(rest):
        yield f"mlp.experts.{match[1]}", int(match[2]), view
    else:
        yield rest, None, view


def _known_key(prefix: str, rest: str, known: Collection[str]) -> str:
    """The key that the model has: of norms, under one of two names."""
    others = [pattern.sub(new, rest) for pattern, new in _OTHER_NAMES]
    for each in (rest, *(other for other in others if other != rest)):
        key = checkpoint_key(prefix + each)
        if key in known:
            return key
    raise KeyError(prefix + rest)
