"""OLMo-2 and OLMo-3: norms behind attention and MLP, and over the queries and keys of all heads; OLMoE, of experts."""

import dataclasses
from typing import Any

from models.families.base import (
    ATTENTION,
    ATTENTION_BIAS,
    EXPERT_NUMBERS,
    EXPERTS,
    LLAMA_HEADS,
    LLAMA_WHOLE,
    MLP,
    like_llama,
    llama,
    tiny,
)
from models.hf.block_parts import layer_windows, rotary, rotary_by_window
from models.hf.config_parts import olmoe_experts, tied
from models.hf.keys import Architecture, Config, Unsupported
from models.hf.row_layouts import Table, same
from models.shape_fields import SPANS
from models.shapes import GPTShape


def _olmo2(num_layers: int, hidden_size: int, ffn_hidden_size: int, heads: tuple[int, int], **changes: Any) -> GPTShape:
    """Norms behind attention and MLP instead of before them, and one over the queries, or keys, of all heads.

    heads: (query, key-value). Source: "2 OLMo 2 Furious" (arXiv:2501.00656), section 2, and each config.json.
    """
    shape = dataclasses.replace(
        llama(num_layers, hidden_size, ffn_hidden_size, *heads),
        vocab_size=100352,
        norm_epsilon=1e-6,
        norm_placement="post",
        qk_layernorm=True,
        qk_layernorm_full_width=True,
        rotary_base=500_000,
        hf_model_type="olmo2",
    )
    return dataclasses.replace(shape, **changes)


def _olmo3(shape: GPTShape) -> GPTShape:
    """Three of four blocks with windows of 4,096 tokens, the fourth with positions stretched from 8,192 by YaRN.

    Source: "Olmo 3" (arXiv:2512.13961), section 3.2, and each config.json.
    """
    return dataclasses.replace(
        shape,
        vocab_size=100278,
        window_size=(4095, 0),
        window_attn_skip_freq="4",
        rotary_base_local=500_000,
        rope_scaling="yarn",
        rope_scaling_factor=8.0,
        rope_original_max_position_embeddings=8192,
        max_position_embeddings=65536,
        hf_model_type="olmo3",
    )


PUBLISHED: dict[str, GPTShape] = {
    # https://huggingface.co/allenai/OLMo-2-0425-1B, OLMo-2-1124-7B, -13B, OLMo-2-0325-32B
    "olmo2_1b": _olmo2(16, 2048, 8192, (16, 16)),
    "olmo2_7b": _olmo2(32, 4096, 11008, (32, 32)),
    "olmo2_13b": _olmo2(40, 5120, 13824, (40, 40)),
    "olmo2_32b": _olmo2(64, 5120, 27648, (40, 8)),
    # https://huggingface.co/allenai/Olmo-3-1025-7B, Olmo-3-1125-32B
    "olmo3_7b": _olmo3(_olmo2(32, 4096, 11008, (32, 32))),
    "olmo3_32b": _olmo3(_olmo2(64, 5120, 27648, (40, 8))),
    # https://huggingface.co/allenai/OLMoE-1B-7B-0924; "OLMoE" (arXiv:2409.02060), section 2 and appendix B: norms
    # before blocks, and over the queries and keys of all heads.
    "olmoe_7b": dataclasses.replace(
        llama(16, 2048, 1024, 16, 16),
        vocab_size=50304,
        qk_layernorm=True,
        qk_layernorm_full_width=True,
        num_moe_experts=64,
        moe_ffn_hidden_size=1024,
        moe_router_topk=8,
        moe_router_pre_softmax=True,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.01,
        moe_z_loss_coeff=0.001,
    ),
}

TINY: dict[str, GPTShape] = {
    "olmo2_tiny": tiny(PUBLISHED["olmo2_7b"]),
    "olmoe_tiny": tiny(PUBLISHED["olmoe_7b"], num_moe_experts=6, moe_router_topk=3, moe_ffn_hidden_size=40),
    "olmo3_tiny": tiny(PUBLISHED["olmo3_32b"], window_size=(15, 0), rope_original_max_position_embeddings=32),
}


_IMPLIED = {"norm_placement": "post", "qk_layernorm": True, "qk_layernorm_full_width": True}
_DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048}

ARCHITECTURES: dict[str, Architecture] = {
    "olmo2": like_llama(
        "Olmo2ForCausalLM",
        defaults=_DEFAULTS,
        implied=_IMPLIED,
        parts=(LLAMA_HEADS, rotary(), tied(False), ATTENTION_BIAS),
    ),
    "olmo3": like_llama(
        "Olmo3ForCausalLM",
        defaults=_DEFAULTS,
        implied=_IMPLIED,
        parts=(
            LLAMA_HEADS,
            layer_windows(4096, pattern=4),
            rotary_by_window(500_000.0, local=500_000.0, local_key=False),
            tied(False),
            ATTENTION_BIAS,
        ),
    ),
}


def _read_clip(left: Config, fields: dict[str, Any]) -> None:
    value = left.pop("clip_qkv", None)
    if value is not None and value not in SPANS["clip_qkv"]:
        raise Unsupported("clip_qkv", value, f"null, or {SPANS['clip_qkv']}")
    fields["clip_qkv"] = value or 0.0


def _write_clip(shape: GPTShape) -> Config:
    return {"clip_qkv": shape.clip_qkv or None}


ARCHITECTURES["olmoe"] = like_llama(
    "OlmoeForCausalLM",
    numbers=EXPERT_NUMBERS,
    defaults={"rms_norm_eps": 1e-5, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.01},
    implied={"qk_layernorm": True, "qk_layernorm_full_width": True, "moe_router_load_balancing_type": "aux_loss"},
    aliases={"num_local_experts": "num_experts"},
    parts=(LLAMA_HEADS, rotary(), tied(False), ATTENTION_BIAS, olmoe_experts(64), (_read_clip, _write_clip)),
)

BLOCK = {key: rule for key, rule in (ATTENTION | MLP).items() if "layer_norm_" not in key} | {
    "self_attention.linear_proj.post_layernorm.weight": same("post_attention_layernorm.weight"),
    "mlp.linear_fc2.post_layernorm.weight": same("post_feedforward_layernorm.weight"),
}

TABLES: dict[str, Table] = {
    "olmo2": Table(LLAMA_WHOLE, BLOCK),
    "olmo3": Table(LLAMA_WHOLE, BLOCK),
    "olmoe": Table(LLAMA_WHOLE, ATTENTION | EXPERTS),
}
