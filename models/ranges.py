"""Which numbers each field of the model section may have."""

from collections.abc import Callable, Iterator, Mapping

_AT_LEAST_ONE: tuple[str, ...] = (
    "seq_length",
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "max_position_embeddings",
    "rotary_base",
    "rope_scaling_factor",
    "rope_original_max_position_embeddings",
    "vocab_size",
    "make_vocab_size_divisible_by",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "mamba_state_dim",
    "mamba_head_dim",
    "mamba_num_groups",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "moe_router_topk",
    "floor_scale",
)
_AT_LEAST_ZERO: tuple[str, ...] = (
    "q_lora_rank",
    "num_moe_experts",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "latent_norm_epsilon",
    "attention_chunk_size",
    "attn_scale",
    "activation_func_clamp_value",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_bias_update_rate",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_expert_capacity_factor",
    "mamba_num_heads",
    "mtp_num_layers",
    "mtp_loss_scaling_factor",
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "softmax_scale",
    "rotary_base_local",
    "rope_attention_factor",
    "mscale",
    "mscale_all_dim",
)
_ABOVE_ZERO: tuple[str, ...] = (
    "norm_epsilon",
    "init_method_std",
    "rope_low_freq_factor",
    "rope_high_freq_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "moe_router_topk_scaling_factor",
    "residual_multiplier",
    "embedding_multiplier",
    "logits_scaling",
)
_RANGES: list[tuple[tuple[str, ...], str, Callable[[float], bool]]] = [
    (_AT_LEAST_ONE, "1 or more", lambda value: value >= 1),
    (_AT_LEAST_ZERO, "0 or more", lambda value: value >= 0),
    (_ABOVE_ZERO, "above 0", lambda value: value > 0),
    (("hidden_dropout", "attention_dropout"), "in [0, 1)", lambda value: 0 <= value < 1),
    (("rotary_percent",), "in (0, 1]", lambda value: 0 < value <= 1),
]


def range_problems(values: Mapping[str, object]) -> Iterator[str]:
    """values: by field; None: not set."""
    for names, meaning, fits in _RANGES:
        for name in names:
            value = values[name]
            if value is not None and not fits(value):  # type: ignore[arg-type]
                yield f"model.{name} must be {meaning}, found {value}."
