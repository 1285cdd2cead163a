"""Each ``model_type`` that is read and written: its numbers, its switches, and what is neither."""

from typing import Any

from models.hf import rope
from models.hf.config_parts import (
    heads,
    read_gpt2,
    read_mixtral,
    read_no_window,
    read_qwen3_moe,
    read_rope,
    tied,
    window,
    write_gpt2,
    write_mixtral,
    write_no_window,
    write_qwen3_moe,
)
from models.hf.deepseek import (
    V2_DEFAULTS,
    V3_DEFAULTS,
    deepseek_experts,
    read_latent,
    read_mtp,
    read_quantization,
    read_v2_choice,
    read_v3_choice,
    write_latent,
    write_v2_choice,
)
from models.hf.keys import Architecture

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
_LLAMA_HEADS, _HEADS, _WIDE_HEADS = heads(("num_key_value_heads", "head_dim")), heads(("head_dim",)), heads(())
_ROPE = (read_rope, rope.write)
_NO_WINDOW = (read_no_window, write_no_window)

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
    (read_latent, write_latent),
    _ROPE,
    tied(False),
)

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        model_class="LlamaForCausalLM",
        numbers=_LLAMA_NUMBERS,
        defaults=_LLAMA_DEFAULTS,
        switches=_UNBIASED | {"mlp_bias": (False,)},
        implied=_LLAMA_IMPLIED,
        parts=(_LLAMA_HEADS, _ROPE, tied(False)),
    ),
    "mistral": Architecture(
        model_class="MistralForCausalLM",
        numbers=_LLAMA_NUMBERS,
        defaults=_LLAMA_DEFAULTS,
        switches=_LLAMA_SWITCHES,
        implied=_LLAMA_IMPLIED,
        parts=(_HEADS, _ROPE, tied(False), window(4096)),
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
        parts=(_HEADS, _ROPE, tied(False), window(None), (read_mixtral, write_mixtral)),
    ),
    "qwen2": Architecture(
        model_class="Qwen2ForCausalLM",
        numbers=_LLAMA_NUMBERS,
        defaults=_LLAMA_DEFAULTS,
        switches=_LLAMA_SWITCHES,
        implied=_LLAMA_IMPLIED | {"add_qkv_bias": True},
        parts=(_HEADS, _ROPE, tied(False), _NO_WINDOW),
    ),
    "qwen3": Architecture(
        model_class="Qwen3ForCausalLM",
        numbers=_LLAMA_NUMBERS,
        defaults=_LLAMA_DEFAULTS,
        switches=_UNBIASED,
        implied=_LLAMA_IMPLIED | {"qk_layernorm": True},
        parts=(_WIDE_HEADS, _ROPE, tied(False), _NO_WINDOW),
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
        parts=(_WIDE_HEADS, _ROPE, tied(False), _NO_WINDOW, (read_qwen3_moe, write_qwen3_moe)),
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
        parts=(*_DEEPSEEK_PARTS, deepseek_experts(V2_DEFAULTS), (read_v2_choice, write_v2_choice)),
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
            deepseek_experts(V3_DEFAULTS),
            (read_v3_choice, lambda _: {}),
            (read_mtp, lambda shape: {"num_nextn_predict_layers": shape.mtp_num_layers}),
            (read_quantization, lambda _: {}),
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
        parts=((read_gpt2, write_gpt2), tied(True)),
    ),
}
"""By transformers' ``model_type``. Sources: its configuration classes (5.23) and the published config.json files."""
