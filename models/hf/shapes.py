"""``config.json`` <-> ``GPTShape``. No torch here.

Every key of a configuration is one of: a number that is a field of ours; a switch whose only supported value is
written here; without effect on the model; or refused. Exporting writes a configuration, reads it back, and refuses
where the two shapes differ: what transformers' model would not compute is not written.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from models.hf import rope
from models.shapes import GPTShape
from parallel.errors import UserError

Config = dict[str, Any]
Read = Callable[[Config, dict[str, Any]], None]
"""Takes keys from a configuration and puts fields into the shape's. Raises Unsupported."""
Write = Callable[[GPTShape], Config]


class Unsupported(Exception):
    """A key of a configuration whose value means a model that we do not have."""

    def __init__(self, key: str, found: object, expected: str) -> None:
        super().__init__(f"{key} = {found!r}: expected {expected}")


@dataclass(slots=True, frozen=True, kw_only=True)
class Architecture:
    """How one model_type's configuration is read and written."""

    model_class: str
    """Transformers' class, as ``architectures`` has it."""
    numbers: Mapping[str, str]
    """Their key -> our field, the same number."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What a key means that is left out, as their configuration classes have it."""
    switches: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Their key -> its supported values; the first is written."""
    implied: Mapping[str, Any] = field(default_factory=dict)
    """Our fields that every such model has."""
    parts: tuple[tuple[Read, Write], ...] = ()
    """What is not one number for one number."""


NO_EFFECT = frozenset("""
    architectures model_type transformers_version torch_dtype dtype use_cache auto_map _name_or_path name_or_path
    bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id cls_token_id decoder_start_token_id
    pretraining_tp ep_size n_ctx task_specific_params output_router_logits output_attentions output_hidden_states
    return_dict summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    reorder_and_upcast_attn is_encoder_decoder is_decoder id2label label2id problem_type chunk_size_feed_forward
    _attn_implementation_autoset
""".split())  # fmt: skip
"""Keys that say nothing about what the model computes in pretraining."""

WHOLE = {entry.name for entry in dataclasses.fields(GPTShape) if entry.type is int}
"""Fields that are sizes and counts."""

TRAINING_ONLY = frozenset("""
    hidden_dropout attention_dropout init_method_std make_vocab_size_divisible_by mtp_loss_scaling_factor
    moe_router_bias_update_rate moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff
    moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy
""".split())  # fmt: skip
"""Fields of ours that an exported model has no use for: another value is no other model."""


def read_shape(config: Config) -> tuple[str, GPTShape]:
    """The model_type and the architecture that a ``config.json`` describes.

    Raises UserError with everything in it that is not supported, by name.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise UserError(
            f"config.json: model_type {model_type!r} is not supported. Supported: {', '.join(ARCHITECTURES)}."
        )
    architecture = ARCHITECTURES[model_type]
    left = {key: value for key, value in config.items() if key not in NO_EFFECT}
    fields: dict[str, Any] = dict(architecture.implied)
    problems = _read_switches(left, architecture) + _read_numbers(left, fields, architecture)
    for read, _ in architecture.parts if not problems else ():
        try:
            read(left, fields)
        except Unsupported as error:
            problems.append(str(error))
    if not problems:
        problems += [f"{key} = {value!r}: unknown" for key, value in left.items() if value is not None]
    if not problems:
        shape = GPTShape(**fields)
        problems = shape.problems()
        if not problems:
            return model_type, shape
    raise UserError(
        "\n  ".join([f"config.json ({model_type}) has what Triplane's {model_type} does not compute:", *problems])
    )


def write_config(shape: GPTShape) -> tuple[str, Config]:
    """The model_type and a ``config.json`` of this architecture, without ``dtype``.

    Raises UserError with each field of the shape that no supported model of transformers has.
    """
    model_type = _model_type(shape)
    architecture = ARCHITECTURES[model_type]
    config: Config = {"architectures": [architecture.model_class], "model_type": model_type}
    config |= {key: getattr(shape, ours) for key, ours in architecture.numbers.items()}
    config |= {key: values[0] for key, values in architecture.switches.items() if values[0] is not None}
    for _, write in architecture.parts:
        config |= write(shape)
    back = read_shape(config)[1]
    differing = [
        f"model.{name} {getattr(shape, name)!r} (theirs would be {getattr(back, name)!r})"
        for name in (entry.name for entry in dataclasses.fields(GPTShape))
        if name not in TRAINING_ONLY and _meaning(shape, name) != _meaning(back, name)
    ]
    if differing:
        raise UserError("\n  ".join([f"transformers' {model_type}, the nearest, has no:", *differing]))
    return model_type, config


def _meaning(shape: GPTShape, name: str) -> object:
    """A field's value, or what it amounts to where several values mean the same model."""
    per_block = {"moe_layer_freq": "moe_blocks", "no_rope_freq": "no_rope_blocks"}
    if name in ("window_size", "window_attn_skip_freq"):
        return [shape.window_size if windowed else None for windowed in shape.window_blocks]
    if name in per_block:
        return getattr(shape, per_block[name])
    if _is_unused(shape, name):
        return None
    if name == "moe_ffn_hidden_size":
        return shape.expert_ffn_hidden_size
    if name == "ffn_hidden_size" and all(shape.moe_blocks):
        return None
    return getattr(shape, name)


def _is_unused(shape: GPTShape, name: str) -> bool:
    """Whether a field stands for something that this architecture is without."""
    if name.startswith("moe_") and not shape.num_moe_experts:
        return True
    if name in ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"):
        return not shape.multi_latent_attention
    if name == "kv_channels":
        return shape.multi_latent_attention
    if shape.position_embedding_type != "rope":
        return name in rope.FIELDS or name.startswith("rotary_")
    return name in rope.FIELDS and name not in rope.fields_of(shape)


def _model_type(shape: GPTShape) -> str:
    if shape.position_embedding_type == "learned_absolute":
        return "gpt2"
    if shape.multi_latent_attention:
        return "deepseek_v3" if shape.moe_router_score_function == "sigmoid" else "deepseek_v2"
    if shape.num_moe_experts:
        return "qwen3_moe" if shape.qk_layernorm else "mixtral"
    if shape.qk_layernorm:
        return "qwen3"
    if shape.add_qkv_bias:
        return "qwen2"
    return "mistral" if any(shape.window_blocks) else "llama"


def _read_switches(left: Config, architecture: Architecture) -> list[str]:
    problems = []
    for key, values in architecture.switches.items():
        found = left.pop(key, values[0])
        if found not in values:
            problems.append(f"{key} = {found!r}: expected {' or '.join(map(repr, values))}")
    return problems


def _read_numbers(left: Config, fields: dict[str, Any], architecture: Architecture) -> list[str]:
    problems = []
    for key, ours in architecture.numbers.items():
        value = left.pop(key, None)
        value = architecture.defaults.get(key) if value is None else value
        if value is None:
            problems.append(f"{key} is missing")
        elif ours in WHOLE and not _is_whole(value, 1):
            problems.append(str(Unsupported(key, value, "a whole number, 1 or more")))
        elif not _is_number(value):
            problems.append(str(Unsupported(key, value, "a number")))
        else:
            fields[ours] = value
    return problems


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _take(left: Config, key: str, default: int, *, least: int) -> int:
    """A whole number that may be left out or null. Raises Unsupported for anything else, or less than ``least``."""
    value = left.pop(key, None)
    if value is None:
        return default
    if not _is_whole(value, least):
        raise Unsupported(key, value, f"a whole number, {least} or more")
    return int(value)


def _take_list(left: Config, key: str) -> list[Any]:
    """A list that may be left out or null. Raises Unsupported for anything else."""
    value = left.pop(key, None)
    if value is not None and not isinstance(value, list):
        raise Unsupported(key, value, "a list")
    return value or []


def _heads(may_be_missing: tuple[str, ...]) -> tuple[Read, Write]:
    """may_be_missing: keys that mean the plain thing where they are left out or null; for others of these
    architectures transformers has a number of its own there, which no published configuration relies on."""

    def read(left: Config, fields: dict[str, Any]) -> None:
        heads = fields["num_attention_heads"]
        plain = {"num_key_value_heads": heads, "head_dim": fields["hidden_size"] // heads}
        for key, ours in (("num_key_value_heads", "num_query_groups"), ("head_dim", "kv_channels")):
            if left.get(key) is None and key not in may_be_missing:
                raise Unsupported(key, None, "a number")
            fields[ours] = _take(left, key, plain[key], least=1)

    return read, lambda shape: {"num_key_value_heads": shape.num_query_groups, "head_dim": shape.kv_channels}


def _tied(default: bool) -> tuple[Read, Write]:
    """default: what it means where ``tie_word_embeddings`` is left out."""

    def read(left: Config, fields: dict[str, Any]) -> None:
        fields["untie_embeddings_and_output_weights"] = not left.pop("tie_word_embeddings", default)

    return read, lambda shape: {"tie_word_embeddings": shape.tied}


def _read_rope(left: Config, fields: dict[str, Any]) -> None:
    try:
        fields |= rope.read(left, latent=bool(fields.get("multi_latent_attention")))
    except rope.RopeError as error:
        raise Unsupported(error.key, error.found, error.expected) from None


def _read_window(left: Config, fields: dict[str, Any]) -> None:
    """Theirs counts the token itself."""
    window = left.pop("sliding_window", None)
    if window is not None and not _is_whole(window, 1):
        raise Unsupported("sliding_window", window, "a number of tokens or null")
    fields["window_size"] = (-1, 0) if window is None else (window - 1, 0)


def _write_window(shape: GPTShape) -> Config:
    return {"sliding_window": shape.window_size[0] + 1 if any(shape.window_blocks) else None}


def _read_no_window(left: Config, fields: dict[str, Any]) -> None:
    """Qwen's: off by a switch of its own, whatever the other keys say; on, it holds from some block on."""
    if left.pop("use_sliding_window", False):
        raise Unsupported("use_sliding_window", True, "false: windows in some blocks only are not converted")
    left.pop("sliding_window", None)
    left.pop("max_window_layers", None)
    kinds = _take_list(left, "layer_types")
    if any(kind != "full_attention" for kind in kinds):
        raise Unsupported("layer_types", kinds, '"full_attention" in every block')


def _write_no_window(shape: GPTShape) -> Config:
    return {"use_sliding_window": False, "sliding_window": None}


def _read_mixtral(left: Config, fields: dict[str, Any]) -> None:
    fields["moe_ffn_hidden_size"] = fields["ffn_hidden_size"]


def _write_mixtral(shape: GPTShape) -> Config:
    return {"intermediate_size": shape.expert_ffn_hidden_size}


def _read_qwen3_moe(left: Config, fields: dict[str, Any]) -> None:
    """transformers 5 writes num_experts as num_local_experts."""
    experts = _take(left, "num_experts", 0, least=1)
    also = _take(left, "num_local_experts", 0, least=1)
    if experts and also and experts != also:
        raise Unsupported("num_local_experts", also, f"{experts}, which num_experts says")
    fields["num_moe_experts"] = experts or also or 128
    fields["moe_router_pre_softmax"] = not left.pop("norm_topk_prob", False)
    dense, step = _take_list(left, "mlp_only_layers"), _take(left, "decoder_sparse_step", 1, least=1)
    blocks = range(fields["num_layers"])
    fields["moe_layer_freq"] = _freq([block not in dense and (block + 1) % step == 0 for block in blocks])


def _write_qwen3_moe(shape: GPTShape) -> Config:
    return {
        "num_experts": shape.num_moe_experts,
        "norm_topk_prob": not shape.moe_router_pre_softmax,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [block for block, moe in enumerate(shape.moe_blocks) if not moe],
        "moe_intermediate_size": shape.expert_ffn_hidden_size,
    }


def _freq(moe: list[bool]) -> str:
    """A layer frequency for each block; the shortest way to say it where all or all after the first few are alike."""
    dense = moe.index(True) if True in moe else len(moe)
    if all(moe):
        return "1"
    if all(moe[dense:]):
        return f"[0]*{dense}+[1]*{len(moe) - dense}"
    return str([int(each) for each in moe]).replace(" ", "")


def _read_gpt2(left: Config, fields: dict[str, Any]) -> None:
    fields["num_query_groups"] = fields["num_attention_heads"]
    fields["kv_channels"] = fields["hidden_size"] // fields["num_attention_heads"]
    fields["ffn_hidden_size"] = _take(left, "n_inner", 4 * fields["hidden_size"], least=1)
    embedding = left.pop("embd_pdrop", 0.1)
    if embedding != fields["hidden_dropout"]:
        raise Unsupported("embd_pdrop", embedding, f"{fields['hidden_dropout']}, the same as resid_pdrop")


def _write_gpt2(shape: GPTShape) -> Config:
    return {"n_inner": shape.ffn_hidden_size, "embd_pdrop": shape.hidden_dropout}


def _read_latent(left: Config, fields: dict[str, Any]) -> None:
    heads = fields["num_query_groups"] = fields["num_attention_heads"]
    groups = left.pop("num_key_value_heads", heads)
    if groups != heads:
        raise Unsupported("num_key_value_heads", groups, f"{heads}, num_attention_heads")
    for key in ("head_dim", "qk_head_dim"):  # transformers writes sums and copies of the others
        left.pop(key, None)
    fields["q_lora_rank"] = _take(left, "q_lora_rank", 0, least=0)
    fields["kv_channels"] = fields["qk_head_dim"]


def _write_latent(shape: GPTShape) -> Config:
    return {"num_key_value_heads": shape.num_query_groups, "q_lora_rank": shape.q_lora_rank or None}


def _read_deepseek_experts(left: Config, fields: dict[str, Any]) -> None:
    shared = _take(left, "n_shared_experts", 0, least=0)
    fields["moe_shared_expert_intermediate_size"] = shared * fields["moe_ffn_hidden_size"]
    dense, blocks = _take(left, "first_k_dense_replace", 0, least=0), fields["num_layers"]
    fields["moe_layer_freq"] = _freq([block >= dense for block in range(blocks)])
    groups, chosen = _take(left, "n_group", 1, least=0) or 1, _take(left, "topk_group", 1, least=0) or 1
    fields |= {"moe_router_num_groups": groups, "moe_router_group_topk": chosen} if groups > 1 else {}
    coefficient = left.pop("aux_loss_alpha", None)
    if coefficient is not None and not _is_number(coefficient):
        raise Unsupported("aux_loss_alpha", coefficient, "a number")
    fields |= {"moe_aux_loss_coeff": coefficient} if coefficient is not None else {}
    if not left.pop("seq_aux", True):
        fields["moe_router_load_balancing_type"] = "aux_loss"


def _write_deepseek_experts(shape: GPTShape) -> Config:
    width = shape.expert_ffn_hidden_size
    dense = shape.moe_blocks.index(True) if True in shape.moe_blocks else shape.num_layers
    return {
        "n_shared_experts": shape.moe_shared_expert_intermediate_size // width or None,
        "moe_intermediate_size": width,
        "first_k_dense_replace": dense,
        "n_group": shape.moe_router_num_groups or 1,
        "topk_group": shape.moe_router_group_topk or 1,
    }


def _read_v2_choice(left: Config, fields: dict[str, Any]) -> None:
    """``greedy`` looks at no groups, whatever n_group says."""
    method = left.pop("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise Unsupported("topk_method", method, "'greedy' or 'group_limited_greedy'")
    if method == "greedy":
        fields |= {"moe_router_num_groups": 0, "moe_router_group_topk": 0}


def _write_v2_choice(shape: GPTShape) -> Config:
    return {"topk_method": "group_limited_greedy" if shape.moe_router_num_groups else "greedy"}


def _read_mtp(left: Config, fields: dict[str, Any]) -> None:
    """Absent, it is 1 in transformers' class, but the files decide: the importer leaves out what they lack."""
    fields["mtp_num_layers"] = _take(left, "num_nextn_predict_layers", 0, least=0)


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def _read_quantization(left: Config, fields: dict[str, Any]) -> None:
    """DeepSeek-V3's own: fp8 matrices with a scale for each 128 x 128 block. How activations are rounded is no
    matter of the weights."""
    found = left.pop("quantization_config", None)
    if found is None:
        return
    if not isinstance(found, dict):
        raise Unsupported("quantization_config", found, f"{FP8}")
    differing = {key: found.get(key) for key, value in FP8.items() if found.get(key) != value}
    unknown = {key: value for key, value in found.items() if key not in {*FP8, "activation_scheme"}}
    if differing or unknown:
        raise Unsupported("quantization_config", differing | unknown, f"{FP8}")


_LLAMA_NUMBERS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "norm_epsilon",
    "attention_dropout": "attention_dropout",
    "initializer_range": "init_method_std",
}
_LLAMA_DEFAULTS = {"attention_dropout": 0.0, "initializer_range": 0.02, "rms_norm_eps": 1e-6}
_LLAMA_IMPLIED = {
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "hidden_dropout": 0.0,
}
_LLAMA_SWITCHES: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu",)}
_UNBIASED = _LLAMA_SWITCHES | {"attention_bias": (False,)}
_LLAMA_HEADS, _HEADS, _WIDE_HEADS = _heads(("num_key_value_heads", "head_dim")), _heads(("head_dim",)), _heads(())
_ROPE = (_read_rope, rope.write)
_WINDOW, _NO_WINDOW = (_read_window, _write_window), (_read_no_window, _write_no_window)

_DEEPSEEK_NUMBERS = _LLAMA_NUMBERS | {
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
    "n_routed_experts": "num_moe_experts",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "num_experts_per_tok": "moe_router_topk",
    "routed_scaling_factor": "moe_router_topk_scaling_factor",
}
_DEEPSEEK_IMPLIED = _LLAMA_IMPLIED | {
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "moe_router_load_balancing_type": "seq_aux_loss",
}
_DEEPSEEK_PARTS = (
    (_read_latent, _write_latent),
    _ROPE,
    _tied(False),
    (_read_deepseek_experts, _write_deepseek_experts),
)

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        model_class="LlamaForCausalLM",
        numbers=_LLAMA_NUMBERS,
        defaults=_LLAMA_DEFAULTS,
        switches=_UNBIASED | {"mlp_bias": (False,)},
        implied=_LLAMA_IMPLIED,
        parts=(_LLAMA_HEADS, _ROPE, _tied(False)),
    ),
    "mistral": Architecture(
        model_class="MistralForCausalLM",
        numbers=_LLAMA_NUMBERS,
        defaults=_LLAMA_DEFAULTS,
        switches=_LLAMA_SWITCHES,
        implied=_LLAMA_IMPLIED,
        parts=(_HEADS, _ROPE, _tied(False), _WINDOW),
    ),
    "mixtral": Architecture(
        model_class="MixtralForCausalLM",
        numbers=_LLAMA_NUMBERS
        | {
            "num_local_experts": "num_moe_experts",
            "num_experts_per_tok": "moe_router_topk",
            "router_aux_loss_coef": "moe_aux_loss_coeff",
        },
        defaults=_LLAMA_DEFAULTS
        | {"rms_norm_eps": 1e-5, "num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001},
        switches=_LLAMA_SWITCHES | {"router_jitter_noise": (0.0,)},
        implied=_LLAMA_IMPLIED | {"moe_router_load_balancing_type": "aux_loss"},
        parts=(_HEADS, _ROPE, _tied(False), _WINDOW, (_read_mixtral, _write_mixtral)),
    ),
    "qwen2": Architecture(
        model_class="Qwen2ForCausalLM",
        numbers=_LLAMA_NUMBERS,
        defaults=_LLAMA_DEFAULTS,
        switches=_LLAMA_SWITCHES,
        implied=_LLAMA_IMPLIED | {"add_qkv_bias": True},
        parts=(_HEADS, _ROPE, _tied(False), _NO_WINDOW),
    ),
    "qwen3": Architecture(
        model_class="Qwen3ForCausalLM",
        numbers=_LLAMA_NUMBERS,
        defaults=_LLAMA_DEFAULTS,
        switches=_UNBIASED,
        implied=_LLAMA_IMPLIED | {"qk_layernorm": True},
        parts=(_WIDE_HEADS, _ROPE, _tied(False), _NO_WINDOW),
    ),
    "qwen3_moe": Architecture(
        model_class="Qwen3MoeForCausalLM",
        numbers=_LLAMA_NUMBERS
        | {
            "moe_intermediate_size": "moe_ffn_hidden_size",
            "num_experts_per_tok": "moe_router_topk",
            "router_aux_loss_coef": "moe_aux_loss_coeff",
        },
        defaults=_LLAMA_DEFAULTS
        | {"moe_intermediate_size": 768, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.001},
        switches=_UNBIASED,
        implied=_LLAMA_IMPLIED | {"qk_layernorm": True, "moe_router_load_balancing_type": "global_aux_loss"},
        parts=(_WIDE_HEADS, _ROPE, _tied(False), _NO_WINDOW, (_read_qwen3_moe, _write_qwen3_moe)),
    ),
    "deepseek_v2": Architecture(
        model_class="DeepseekV2ForCausalLM",
        numbers=_DEEPSEEK_NUMBERS,
        defaults=_LLAMA_DEFAULTS | {"routed_scaling_factor": 1.0},
        switches=_UNBIASED
        | {
            "mlp_bias": (False,),
            "moe_layer_freq": (1,),
            "scoring_func": ("softmax",),
            "norm_topk_prob": (False,),
        },
        implied=_DEEPSEEK_IMPLIED | {"moe_router_pre_softmax": True},
        parts=(*_DEEPSEEK_PARTS, (_read_v2_choice, _write_v2_choice)),
    ),
    "deepseek_v3": Architecture(
        model_class="DeepseekV3ForCausalLM",
        numbers=_DEEPSEEK_NUMBERS,
        defaults=_LLAMA_DEFAULTS | {"routed_scaling_factor": 2.5},
        switches=_UNBIASED
        | {
            "moe_layer_freq": (1,),
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
            "norm_topk_prob": (True,),
            "rope_interleave": (True,),
        },
        implied=_DEEPSEEK_IMPLIED
        | {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_aux_loss_coeff": 1e-4,  # no key of theirs; arXiv:2412.19437, section 4.2
            "mtp_loss_scaling_factor": 0.3,
        },
        parts=(
            *_DEEPSEEK_PARTS,
            (_read_mtp, lambda shape: {"num_nextn_predict_layers": shape.mtp_num_layers}),
            (_read_quantization, lambda _: {}),
        ),
    ),
    "gpt2": Architecture(
        model_class="GPT2LMHeadModel",
        numbers={
            "vocab_size": "vocab_size",
            "n_embd": "hidden_size",
            "n_layer": "num_layers",
            "n_head": "num_attention_heads",
            "n_positions": "max_position_embeddings",
            "layer_norm_epsilon": "norm_epsilon",
            "initializer_range": "init_method_std",
            "resid_pdrop": "hidden_dropout",
            "attn_pdrop": "attention_dropout",
        },
        defaults={"initializer_range": 0.02, "layer_norm_epsilon": 1e-5, "resid_pdrop": 0.1, "attn_pdrop": 0.1},
        switches={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "add_cross_attention": (False,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "scale_attn_weights": (True,),
        },
        implied={
            "normalization": "LayerNorm",
            "activation": "gelu",
            "add_bias_linear": True,
            "position_embedding_type": "learned_absolute",
        },
        parts=((_read_gpt2, _write_gpt2), _tied(True)),
    ),
}
"""By transformers' ``model_type``. Sources: its configuration classes (5.23) and the published config.json files."""
