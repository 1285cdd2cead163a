"""Each ``model_type`` that is read and written: its numbers, its switches, and what is neither. No torch here."""

from typing import Any

from models.hf import rope
from models.hf.keys import Architecture, Config, Read, Unsupported, Write, is_number, is_whole, take, take_list
from models.shapes import GPTShape


def _heads(may_be_missing: tuple[str, ...]) -> tuple[Read, Write]:
    """may_be_missing: keys that mean the plain thing where they are left out or null; for others of these
    architectures transformers has a number of its own there, which no published configuration relies on."""

    def read(left: Config, fields: dict[str, Any]) -> None:
        heads = fields["num_attention_heads"]
        plain = {"num_key_value_heads": heads, "head_dim": fields["hidden_size"] // heads}
        for key, ours in (("num_key_value_heads", "num_query_groups"), ("head_dim", "kv_channels")):
            if left.get(key) is None and key not in may_be_missing:
                raise Unsupported(key, None, "a number")
            fields[ours] = take(left, key, plain[key], least=1)

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
    if window is not None and not is_whole(window, 1):
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
    kinds = take_list(left, "layer_types")
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
    experts = take(left, "num_experts", 0, least=1)
    also = take(left, "num_local_experts", 0, least=1)
    if experts and also and experts != also:
        raise Unsupported("num_local_experts", also, f"{experts}, which num_experts says")
    fields["num_moe_experts"] = experts or also or 128
    fields["moe_router_pre_softmax"] = not left.pop("norm_topk_prob", False)
    dense, step = take_list(left, "mlp_only_layers"), take(left, "decoder_sparse_step", 1, least=1)
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
    fields["ffn_hidden_size"] = take(left, "n_inner", 4 * fields["hidden_size"], least=1)
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
    fields["q_lora_rank"] = take(left, "q_lora_rank", 0, least=0)
    fields["kv_channels"] = fields["qk_head_dim"]


def _write_latent(shape: GPTShape) -> Config:
    return {"num_key_value_heads": shape.num_query_groups, "q_lora_rank": shape.q_lora_rank or None}


def _read_deepseek_experts(left: Config, fields: dict[str, Any]) -> None:
    shared = take(left, "n_shared_experts", 0, least=0)
    fields["moe_shared_expert_intermediate_size"] = shared * fields["moe_ffn_hidden_size"]
    dense, blocks = take(left, "first_k_dense_replace", 0, least=0), fields["num_layers"]
    fields["moe_layer_freq"] = _freq([block >= dense for block in range(blocks)])
    groups, chosen = take(left, "n_group", 1, least=0) or 1, take(left, "topk_group", 1, least=0) or 1
    fields |= {"moe_router_num_groups": groups, "moe_router_group_topk": chosen} if groups > 1 else {}
    coefficient = left.pop("aux_loss_alpha", None)
    if coefficient is not None and not is_number(coefficient):
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
    fields["mtp_num_layers"] = take(left, "num_nextn_predict_layers", 0, least=0)


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
