"""``config.json`` <-> ``GPTShape``.

Every key of a configuration is one of: a number that is one of our fields; a switch whose only supported value is
written here; or without effect on the model, among them those that neither transformers' class nor we read. Exporting
writes a configuration, reads it back, and refuses where the two shapes differ: what transformers' model would not
compute is not written.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from models.families import ARCHITECTURES
from models.hf import rope
from models.hf.keys import Architecture, Config, Unsupported, is_one_of
from models.hf.other_keys import NO_EFFECT, is_off, left_problems, token_problems
from models.hf.unsupported import unsupported
from models.shape_fields import SPANS, declared
from models.shape_problems import shape_problems
from models.shapes import GPTShape
from models.symbols import MLPS
from program.errors import UserError

TRAINING_ONLY = frozenset(name for name, about in declared() if not about.exported)
"""Our fields that an exported model has no use for: another value is no other model."""


class _NotRead(Exception):
    """A part needs a field that another one, which was refused, would have given."""


class _Fields(dict[str, Any]):
    """Of the shape, as far as they are read."""

    def __missing__(self, name: str) -> Any:
        raise _NotRead(name)


def read_shape(config: Config) -> tuple[str, GPTShape]:
    """The model_type and the architecture that a ``config.json`` describes.

    Raises UserError with everything in it that is not supported, by name.
    """
    model_type, shape, _ = _read(config)
    return model_type, shape


def unread(config: Config) -> Config:
    """Keys that mean nothing to the model: neither transformers' class nor Triplane reads them. Raises as
    ``read_shape``."""
    return _read(config)[2]


def without_effect(config: Config, model_type: str) -> Config:
    """What an export as ``model_type`` takes along of the configuration that was imported: keys that say nothing of the
    model."""
    found = NO_EFFECT
    if config.get("model_type") == model_type:
        with contextlib.suppress(UserError):  # of another model of the type, whose tokenizer is taken along
            found = NO_EFFECT | unread(config).keys()
    return {key: value for key, value in config.items() if key in found and key != "auto_map"}


def _read(config: Config) -> tuple[str, GPTShape, Config]:
    """And the keys that have no reader."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise UserError(unsupported(config))
    architecture = ARCHITECTURES[model_type]
    left = {key: value for key, value in config.items() if key not in NO_EFFECT}
    fields: dict[str, Any] = _Fields(architecture.implied)
    problems = token_problems(config) + _read_aliases(left, architecture)
    problems += _read_switches(left, architecture) + _read_numbers(left, fields, architecture)
    for read, _ in architecture.parts if not problems else ():
        try:
            read(left, fields)
        except Unsupported as error:
            problems.append(str(error))
        except _NotRead:
            if not problems:
                raise
    left = {key: value for key, value in left.items() if not is_off(key, value)}
    if not problems:
        problems = list(left_problems(left, has_code=config.get("auto_map") is not None))
    if not problems:
        shape = GPTShape(**{"hf_model_type": model_type} | fields)
        problems = shape_problems(shape)
        if not problems:
            return model_type, shape, left
    own_names = {key: alias for alias, key in architecture.aliases.items() if alias in config and key not in config}
    for key, alias in own_names.items():
        problems = [problem.replace(key, alias) if problem.startswith(f"{key} ") else problem for problem in problems]
    raise UserError(
        "\n  ".join([f"config.json ({model_type}) has what Triplane's {model_type} does not compute:", *problems])
    )


def write_config(shape: GPTShape) -> tuple[str, Config]:
    """The model_type and a ``config.json`` of this architecture, without ``dtype``.

    Of several that mean this model, the one it was imported as; else the first. Raises UserError with each field of the
    shape that the nearest supported model of transformers does not have.
    """
    first: UserError | None = None
    for model_type in _candidates(shape):
        try:
            return model_type, _written(model_type, shape)
        except UserError as error:
            first = first or error
    assert first is not None
    raise first


def _candidates(shape: GPTShape) -> list[str]:
    """Every model_type, the likely ones first."""
    own = [shape.hf_model_type] if shape.hf_model_type in ARCHITECTURES else []
    alike = [name for name, architecture in ARCHITECTURES.items() if _has_implied(shape, architecture)]
    return list(dict.fromkeys([*own, _nearest(shape), *alike]))


def _has_implied(shape: GPTShape, architecture: Architecture) -> bool:
    """Whether this model has what each of that architecture has."""
    like = dataclasses.replace(shape, **architecture.implied)
    return all(
        _meaning(shape, name) == _meaning(like, name) for name in architecture.implied if name not in TRAINING_ONLY
    )


def _written(model_type: str, shape: GPTShape) -> Config:
    """Raises UserError with each field of the shape that no model of this type has."""
    architecture = ARCHITECTURES[model_type]
    config: Config = {"architectures": [architecture.model_class], "model_type": model_type}
    config |= {key: getattr(shape, ours) for key, ours in architecture.numbers.items()}
    config |= {key: values[0] for key, values in architecture.switches.items() if values[0] is not None}
    for _, write in architecture.parts:
        config |= write(shape)
    try:
        back = read_shape(config)[1]
    except UserError as error:
        problems = str(error).splitlines()[1:]
        what = f"transformers' {model_type}, the nearest, would compute another model; its config.json would have:"
        raise UserError("\n".join([what, *problems])) from None
    differing = [
        f"model.{name} {ours!r} (theirs would be {theirs!r})" for name, (ours, theirs) in differing_fields(shape, back)
    ]
    if differing:
        raise UserError("\n  ".join([f"transformers' {model_type}, the nearest, has no:", *differing]))
    return config


def differing_fields(one: GPTShape, other: GPTShape) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Fields in which two architectures are two models, with both values."""
    for name in (entry.name for entry in dataclasses.fields(GPTShape)):
        if name not in TRAINING_ONLY and _meaning(one, name) != _meaning(other, name):
            yield name, (getattr(one, name), getattr(other, name))


def _meaning(shape: GPTShape, name: str) -> object:
    """A field's value, or what it amounts to where several values mean the same model."""
    per_block = {
        "moe_layer_freq": "moe_blocks",
        "no_rope_freq": "no_rope_blocks",
        "linear_attention_freq": "linear_blocks",
    }
    if name == "window_size":
        return [shape.window_size if windowed else None for windowed in shape.window_blocks]
    if name == "window_attn_skip_freq" or name in ("add_qkv_bias", "attention_out_bias", "mlp_bias"):
        return None  # said by window_size and add_bias_linear
    if name == "add_bias_linear":
        return shape.qkv_bias, shape.proj_bias, shape.fc_bias
    if name == "rotary_base_local":
        return shape.rotary_base_local if shape.has_local_rope else 0
    if name.startswith("mup_") and not shape.use_mup:
        return GPTShape.__dataclass_fields__[name].default
    if name in per_block:
        return getattr(shape, per_block[name])
    if _is_unused(shape, name):
        return None
    if name == "softmax_scale":
        return shape.softmax_scale or shape.kv_channels**-0.5
    if name == "latent_norm_epsilon":
        return shape.latent_norm_epsilon or shape.norm_epsilon
    if name == "mamba_num_heads":
        return shape.mamba_heads
    if name == "moe_ffn_hidden_size":
        return shape.expert_ffn_hidden_size
    if name == "ffn_hidden_size" and all(shape.moe_blocks):
        return None
    return getattr(shape, name)


def _is_unused(shape: GPTShape, name: str) -> bool:
    """Whether a field stands for something that this architecture is without."""
    if name.startswith("moe_") and not shape.num_moe_experts:
        return True
    if name in (
        "q_lora_rank",
        "kv_lora_rank",
        "qk_head_dim",
        "qk_pos_emb_head_dim",
        "v_head_dim",
        "latent_norm_epsilon",
    ):
        return not shape.multi_latent_attention
    if name.startswith("linear_"):
        return not any(shape.linear_blocks)
    if name in ("floor_scale", "attn_scale_all_blocks"):
        return not shape.attn_scale
    if name.startswith("mamba_"):
        return "M" not in shape.hybrid_layer_pattern
    if name in ("num_attention_heads", "num_query_groups", "kv_channels", "qk_layernorm", "add_qkv_bias"):
        return not shape.has_attention or (name == "kv_channels" and shape.multi_latent_attention)
    if name == "softmax_scale":
        return shape.multi_latent_attention or not shape.has_attention
    if name in ("ffn_hidden_size", "activation") and shape.hybrid_layer_pattern:
        return not set(shape.hybrid_layer_pattern) & set(MLPS)
    if name == "max_position_embeddings" and shape.position_embedding_type == "none":
        return True
    if shape.position_embedding_type != "rope":
        return name in rope.FIELDS or name.startswith("rotary_")
    return name in rope.FIELDS and name not in rope.fields_of(shape)


def _nearest(shape: GPTShape) -> str:
    """Whose lacks an error names where none fits."""
    if any(shape.linear_blocks):
        return "qwen3_next" if shape.num_moe_experts else "qwen3_5_text"
    if shape.hybrid_layer_pattern:
        return "mamba2" if set(shape.hybrid_layer_pattern) == {"M"} else "nemotron_h"
    if shape.position_embedding_type == "learned_absolute":
        return "gpt2"
    if shape.multi_latent_attention:
        return "deepseek_v3" if shape.moe_router_score_function == "sigmoid" else "deepseek_v2"
    if shape.num_moe_experts:
        if shape.softmax_type == "learnable":
            return "gpt_oss"
        if shape.moe_shared_expert_gate:
            return "qwen2_moe"
        return "qwen3_moe" if shape.qk_layernorm else "mixtral"
    if shape.qk_layernorm:
        return "qwen3"
    if shape.add_qkv_bias:
        return "qwen2"
    return "mistral" if any(shape.window_blocks) else "llama"


def _read_aliases(left: Config, architecture: Architecture) -> list[str]:
    problems = []
    for alias, key in architecture.aliases.items():
        if (value := left.pop(alias, None)) is not None and left.get(key) is None:
            left[key] = value
        elif value is not None and value != left[key]:
            problems.append(str(Unsupported(alias, value, f"{left[key]}, which {key} says")))
    return problems


def _read_switches(left: Config, architecture: Architecture) -> list[str]:
    problems = []
    for key, values in architecture.switches.items():
        found = left.pop(key, values[0])
        if not is_one_of(found, values):
            problems.append(str(Unsupported(key, found, " or ".join(map(repr, values)))))
    return problems


def _read_numbers(left: Config, fields: dict[str, Any], architecture: Architecture) -> list[str]:
    problems = []
    for key, ours in architecture.numbers.items():
        value = left.pop(key, None)
        value = architecture.defaults.get(key) if value is None else value
        if value is None:
            problems.append(f"{key} is missing")
        elif (problem := SPANS[ours].problem(key, value)) is not None:
            problems.append(problem)
        else:
            fields[ours] = value
    return problems
