"""Llama 4, its text model."""

import dataclasses
from typing import Any

from models.families.base import ATTENTION, ATTENTION_BIAS, LLAMA_WHOLE, WIDE_HEADS, like_llama, llama, tiny
from models.hf.block_parts import rotary
from models.hf.config_parts import TOKENS, WHOLE, freq, tied
from models.hf.keys import Architecture, Config, Unsupported, pop_number, take_bool, take_list
from models.hf.row_layouts import Table, fused_experts, same, stacked
from models.shapes import GPTShape
from models.spans import Span


def _llama4(num_moe_experts: int, **changes: Any) -> GPTShape:
    """Chunks of 8,192 tokens in blocks with RoPE; every fourth goes without and sees everything, with queries that
    grow; one expert a token, by a sigmoid that multiplies what it reads, beside a shared one.

    Source: https://github.com/meta-llama/llama-models (models/llama4), and the text_config of each config.json.
    """
    settings: dict[str, Any] = {
        "vocab_size": 202_048,
        "rotary_base": 500_000,
        "rotary_interleaved": True,
        "no_rope_freq": "4",
        "attention_chunk_size": 8192,
        "attn_scale": 0.1,
        "floor_scale": 8192,
        "num_moe_experts": num_moe_experts,
        "moe_ffn_hidden_size": 8192,
        "moe_shared_expert_intermediate_size": 8192,
        "moe_router_topk": 1,
        "moe_router_score_function": "sigmoid",
        "moe_apply_probs_on_input": True,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-3,
    }
    shape = llama(48, 5120, 16384, num_attention_heads=40, num_query_groups=8)
    return dataclasses.replace(shape, **settings | changes)


PUBLISHED: dict[str, GPTShape] = {
    # https://huggingface.co/meta-llama/Llama-4-Scout-17B-16E and Llama-4-Maverick-17B-128E
    "llama4_scout": _llama4(
        16,
        qk_l2_norm=True,
        rope_scaling="llama3",
        rope_scaling_factor=16.0,
        rope_low_freq_factor=1.0,
        rope_high_freq_factor=1.0,
        rope_original_max_position_embeddings=8192,
        max_position_embeddings=10_485_760,
    ),
    "llama4_maverick": _llama4(128, moe_layer_freq="[0,1]*24", max_position_embeddings=1_048_576),
}

TINY: dict[str, GPTShape] = {
    "llama4_tiny": tiny(
        PUBLISHED["llama4_scout"],
        rope_original_max_position_embeddings=64,
        attention_chunk_size=24,
        floor_scale=8,
        num_moe_experts=4,
        moe_ffn_hidden_size=48,
        moe_shared_expert_intermediate_size=48,
    ),
}


CHUNKED = "chunked_attention"


def _read_blocks(left: Config, fields: dict[str, Any]) -> None:
    """Which blocks go without RoPE, and so see everything, and which have experts."""
    blocks = range(fields["num_layers"])
    every = pop_number(left, "no_rope_layer_interval", 4, TOKENS)
    rope = take_list(left, "no_rope_layers") or [int((block + 1) % every != 0) for block in blocks]
    if len(rope) != len(blocks) or any(isinstance(one, bool) or one not in (0, 1) for one in rope):
        raise Unsupported("no_rope_layers", rope, f"0 or 1 for each of {len(blocks)} blocks")
    fields["no_rope_freq"] = freq([not one for one in rope]) if not all(rope) else "0"
    if (kinds := take_list(left, "layer_types")) and kinds != _kinds(rope):
        raise Unsupported("layer_types", kinds, f'"{CHUNKED}" in blocks with RoPE, "{WHOLE}" in the others')
    step = pop_number(left, "interleave_moe_layer_step", 1, TOKENS)
    moe = left.pop("moe_layers", None)
    moe = [block for block in blocks if (block + 1) % step == 0] if moe is None else moe
    if not isinstance(moe, list) or not moe or any(isinstance(one, bool) or one not in blocks for one in moe):
        raise Unsupported("moe_layers", moe, f"numbers of blocks, 0 to {len(blocks) - 1}, one at least")
    fields["moe_layer_freq"] = freq([block in moe for block in blocks])


def _kinds(rope: list[Any]) -> list[str]:
    return [CHUNKED if one else WHOLE for one in rope]


def _write_blocks(shape: GPTShape) -> Config:
    """As ``_read_blocks``."""
    rope = [int(not without) for without in shape.no_rope_blocks]
    return {
        "no_rope_layers": rope,
        "layer_types": _kinds(rope),
        "moe_layers": [block for block, moe in enumerate(shape.moe_blocks) if moe],
    }


def _read(left: Config, fields: dict[str, Any]) -> None:
    """Chunks, norms of queries and keys, and queries that grow; experts of one width."""
    fields["moe_shared_expert_intermediate_size"] = fields["moe_ffn_hidden_size"]
    chunk = left.pop("attention_chunk_size", 8192)
    if TOKENS.problem("attention_chunk_size", chunk) is not None:
        raise Unsupported("attention_chunk_size", chunk, str(TOKENS))
    fields["attention_chunk_size"] = chunk
    fields["qk_l2_norm"] = take_bool(left, "use_qk_norm", True)
    tuned = left.pop("attn_temperature_tuning", True)
    if not isinstance(tuned, bool | int):
        raise Unsupported("attn_temperature_tuning", tuned, "true or false")
    scale, floor = left.pop("attn_scale", 0.1), pop_number(left, "floor_scale", 8192, TOKENS)
    if tuned and fields["no_rope_freq"] != "0":
        if Span(0, 1e3, above=True).problem("attn_scale", scale) is not None:
            raise Unsupported("attn_scale", scale, "a number above 0")
        fields |= {"attn_scale": scale, "floor_scale": floor}
    left.pop("for_llm_compressor", None)


def _write(shape: GPTShape) -> Config:
    """As ``_read``."""
    return {
        "intermediate_size": shape.expert_ffn_hidden_size,
        "attention_chunk_size": shape.attention_chunk_size or None,
        "use_qk_norm": shape.qk_l2_norm,
        "attn_temperature_tuning": shape.attn_scale > 0,
        "attn_scale": shape.attn_scale or 0.1,
        "floor_scale": shape.floor_scale,
    }


ARCHITECTURES: dict[str, Architecture] = {
    "llama4_text": like_llama(
        "Llama4ForCausalLM",
        numbers={
            "intermediate_size": "moe_ffn_hidden_size",
            "intermediate_size_mlp": "ffn_hidden_size",
            "num_local_experts": "num_moe_experts",
            "router_aux_loss_coef": "moe_aux_loss_coeff",
        },
        defaults={
            "rms_norm_eps": 1e-5,
            "intermediate_size_mlp": 16384,
            "num_local_experts": 16,
            "router_aux_loss_coef": 0.001,
        },
        # Of several experts, transformers' weights would not sum to 1, and megatron-core's do.
        switches={"num_experts_per_tok": (1,), "router_jitter_noise": (0.0,)},
        implied={
            "rotary_interleaved": True,
            "moe_router_topk": 1,
            "moe_router_score_function": "sigmoid",
            "moe_apply_probs_on_input": True,
            "moe_router_load_balancing_type": "aux_loss",
        },
        parts=(
            WIDE_HEADS,
            rotary(theta=500_000.0),
            tied(False),
            ATTENTION_BIAS,
            (_read_blocks, _write_blocks),
            (_read, _write),
        ),
    ),
}

TABLES: dict[str, Table] = {
    "llama4_text": Table(
        LLAMA_WHOLE,
        ATTENTION
        | {
            "mlp.linear_fc1.layer_norm_weight": same("post_attention_layernorm.weight"),
            "mlp.linear_fc1.weight": stacked("feed_forward.gate_proj.weight", "feed_forward.up_proj.weight"),
            "mlp.linear_fc2.weight": same("feed_forward.down_proj.weight"),
            "pre_mlp_layernorm.weight": same("post_attention_layernorm.weight"),
            "mlp.router.weight": same("feed_forward.router.weight"),
            "mlp.experts.linear_fc1.weight": fused_experts("feed_forward.experts.gate_up_proj", parts=2),
            "mlp.experts.linear_fc2.weight": fused_experts("feed_forward.experts.down_proj"),
            "mlp.shared_experts.linear_fc1.weight": stacked(
                "feed_forward.shared_expert.gate_proj.weight", "feed_forward.shared_expert.up_proj.weight"
            ),
            "mlp.shared_experts.linear_fc2.weight": same("feed_forward.shared_expert.down_proj.weight"),
        },
    ),
}
