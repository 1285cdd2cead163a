"""Whether a checkpoint is one of this model: known from names and shapes before a parameter is touched."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist

from models.names import canonical
from parallel.errors import SharedMistake
from parallel.groups import Ranks
from training.checkpoint import optimizer_state, rng
from training.checkpoint.boxes import Box

Shapes = Mapping[str, tuple[int, ...]]

_VOCABULARY = "the tokenizer, model.vocab_size or model.make_vocab_size_divisible_by"
_HEADS = "model.num_attention_heads, model.num_query_groups or model.kv_channels"
_NORM = "model.normalization"
_WIDTH = "model.ffn_hidden_size"
_GATE = "model.activation"  # a gated one makes fc1 twice as high
# End of a parameter's name -> the fields that its dims come from.
_DIMS: Mapping[str, tuple[str, ...]] = {
    "word_embeddings.weight": (_VOCABULARY, "model.hidden_size"),
    "position_embeddings.weight": ("model.max_position_embeddings", "model.hidden_size"),
    "output_layer.weight": (_VOCABULARY, "model.hidden_size"),
    "linear_qkv.weight": (_HEADS, "model.hidden_size"),
    "linear_qkv.bias": (_HEADS,),
    "q_layernorm.weight": ("model.kv_channels",),
    "k_layernorm.weight": ("model.kv_channels",),
    "linear_proj.weight": ("model.hidden_size", _HEADS),
    "linear_fc1.weight": (f"{_WIDTH} or {_GATE}", "model.hidden_size"),
    "linear_fc1.bias": (f"{_WIDTH} or {_GATE}",),
    "linear_fc2.weight": ("model.hidden_size", _WIDTH),
}
# End of the name of a parameter that only one of the two has -> the field that decides it. The first fits.
_PRESENCE: Sequence[tuple[str, str]] = (
    ("position_embeddings.weight", "model.position_embedding_type"),
    ("output_layer.weight", "model.untie_embeddings_and_output_weights"),
    ("q_layernorm.weight", "model.qk_layernorm"),
    ("k_layernorm.weight", "model.qk_layernorm"),
    ("norm_bias", _NORM),
    ("norm.bias", _NORM),
    ("linear_qkv.bias", "model.add_qkv_bias or model.add_bias_linear"),
    (".bias", "model.add_bias_linear"),
    ("", "model.num_layers"),
)


def check(path: Path, saved: Shapes, boxes: Sequence[Box], ranks: Ranks) -> None:
    """Raises SharedMistake, the same on every rank, unless ``saved`` has what the boxes of all ranks need.

    ``boxes`` may be those of the weights alone. Pipeline stages exchange their names and shapes once.
    """
    needed = _all_stages({box.key: box.global_shape for box in boxes}, ranks)
    model = {key: shape for key, shape in needed.items() if not key.startswith(optimizer_state.PREFIX)}
    others = (optimizer_state.PREFIX, rng.PREFIX)
    found = {key: shape for key, shape in saved.items() if not key.startswith(others)}
    if problem := _difference(found, model):
        own = f"Its own configuration is {path / 'config.toml'}."
        raise SharedMistake(f"checkpoint {path} does not fit this model: {problem} {own}")
    missing = sorted(key for key in needed if saved.get(key) != needed[key])
    if missing:
        raise SharedMistake(
            f"checkpoint {path} lacks the optimizer's state of this model (first: {missing[0]}). "
            "Use --checkpoint.no_load_optim, or --checkpoint.finetune to start anew from its weights."
        )


def _all_stages(own: Shapes, ranks: Ranks) -> dict[str, tuple[int, ...]]:
    """Union over the pipeline group. It is the whole model: TP peers and data ranks have the same keys."""
    gathered: list[Shapes] = [{} for _ in range(ranks.layout.pp)]
    dist.all_gather_object(gathered, own, group=ranks.pgs.pp)
    return {key: shape for stage in gathered for key, shape in stage.items()}


def _difference(saved: Shapes, model: Shapes) -> str | None:
    """What differs, and which fields decide about it; None where nothing does."""
    reshaped = [key for key in sorted(model.keys() & saved.keys()) if model[key] != saved[key]]
    reshaped.sort(key=lambda key: -len(model[key]))  # matrices first: they tell more
    missing, extra = sorted(model.keys() - saved.keys()), sorted(saved.keys() - model.keys())
    sentences = []
    if reshaped:
        key = reshaped[0]
        shapes = f"{list(saved[key])} in the checkpoint and {list(model[key])} here"
        sentences.append(f"{_name(key)} is {shapes}{_more(reshaped)}.")
    if missing:
        sentences.append(f"The checkpoint lacks {_name(missing[0])}{_more(missing)}.")
    if extra:
        sentences.append(f"The checkpoint has {_name(extra[0])}, which this model lacks{_more(extra)}.")
    if not sentences:
        return None
    fields = Counter(field for key in reshaped for field in _fields(_name(key), saved[key], model[key]))
    if _WIDTH in fields:
        del fields[f"{_WIDTH} or {_GATE}"]
    for key in missing + extra:
        fields[next(field for end, field in _PRESENCE if _name(key).endswith(end))] += 1
    return f"{' '.join(sentences)} Probably different: {'; '.join(field for field, _ in fields.most_common())}."


def _fields(name: str, saved: tuple[int, ...], here: tuple[int, ...]) -> list[str]:
    """The configuration's fields behind the dims in which two shapes differ."""
    dims = next((dims for end, dims in _DIMS.items() if name.endswith(end)), ("model.hidden_size",))
    return [field for field, old, new in zip(dims, saved, here, strict=False) if old != new]


def _name(key: str) -> str:
    try:
        return canonical(key)
    except KeyError:
        return key


def _more(keys: Sequence[str]) -> str:
    return f" (and {len(keys) - 1} more)" if len(keys) > 1 else ""
