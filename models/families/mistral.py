"""Mistral, Ministral, Ministral 3 and Mixtral."""

import dataclasses
from typing import Any

from models.families.base import (
    ATTENTION,
    HEADS,
    LLAMA,
    LLAMA_WHOLE,
    LOCAL_EXPERT_NUMBERS,
    ROPE,
    like_llama,
    llama,
    tiny,
)
from models.hf import rope
from models.hf.block_parts import layer_windows
from models.hf.config_parts import read_mixtral, tied, window, write_mixtral
from models.hf.keys import Architecture, Config, Unsupported
from models.hf.row_layouts import Table, experts, same
from models.shapes import GPTShape
from models.spans import Span


def _mixtral(
    num_layers: int, hidden_size: int, ffn_hidden_size: int, num_attention_heads: int, **changes: Any
) -> GPTShape:
    """Mixtral: eight experts in every block, of which a token meets two, weighted by a softmax over these two.

    Source: "Mixtral of Experts" (arXiv:2401.04088), section 2, and the config.json of the model card
    (router_aux_loss_coef).
    """
    shape = dataclasses.replace(
        llama(num_layers, hidden_size, ffn_hidden_size, num_attention_heads, num_query_groups=8),
        rotary_base=1_000_000,
        num_moe_experts=8,
        moe_ffn_hidden_size=ffn_hidden_size,
        moe_router_topk=2,
        moe_router_load_balancing_type="aux_loss",
    )
    return dataclasses.replace(shape, **changes)


def _ministral3(num_layers: int, hidden_size: int, ffn_hidden_size: int, **changes: Any) -> GPTShape:
    """Queries that grow in every block, beyond the 16,384 tokens that YaRN stretches to 262,144.

    Source: transformers 5.23's Ministral3Config, whose defaults are the 8B, and the text_config of each config.json
    (sizes of the 3B and 14B as in Megatron-Bridge's ministral3_provider).
    """
    shape = dataclasses.replace(
        llama(num_layers, hidden_size, ffn_hidden_size, 32, 8),
        kv_channels=128,
        vocab_size=131072,
        rotary_base=1_000_000,
        rope_scaling="yarn",
        rope_scaling_factor=16.0,
        rope_original_max_position_embeddings=16384,
        rope_attention_factor=1.0,
        attn_scale=0.1,
        attn_scale_all_blocks=True,
        floor_scale=16384,
        max_position_embeddings=262_144,
        hf_model_type="ministral3",
    )
    return dataclasses.replace(shape, **changes)


PUBLISHED: dict[str, GPTShape] = {
    # "Mistral 7B" (arXiv:2310.06825), table 1; https://huggingface.co/mistralai/Mistral-7B-v0.1.
    # A window of 4,096 tokens is the token's own and 4,095 before it.
    "mistral_7b": dataclasses.replace(
        llama(32, 4096, 14336, 32, 8), window_size=(4095, 0), max_position_embeddings=32768
    ),
    # https://huggingface.co/mistralai/Ministral-8B-Instruct-2410
    "ministral_8b": dataclasses.replace(
        llama(36, 4096, 12288, 32, 8),
        vocab_size=131072,
        rotary_base=100_000_000,
        window_size=(32767, 0),
        max_position_embeddings=32768,
        hf_model_type="ministral",
    ),
    # https://huggingface.co/mistralai/Ministral-3-3B-Base-2512, -8B and -14B: their text models
    "ministral3_3b": _ministral3(26, 3072, 9216, untie_embeddings_and_output_weights=False),
    "ministral3_8b": _ministral3(34, 4096, 14336),
    "ministral3_14b": _ministral3(40, 5120, 16384, rotary_base=1_000_000_000),
    # https://huggingface.co/mistralai/Mixtral-8x7B-v0.1 and Mixtral-8x22B-v0.1
    "mixtral_8x7b": _mixtral(32, 4096, 14336, 32, max_position_embeddings=32768, moe_aux_loss_coeff=0.02),
    "mixtral_8x22b": _mixtral(56, 6144, 16384, 48, max_position_embeddings=65536, moe_aux_loss_coeff=0.001),
}

TINY: dict[str, GPTShape] = {
    "mistral_tiny": tiny(PUBLISHED["mistral_7b"], window_size=(15, 0)),
    "ministral_tiny": tiny(PUBLISHED["ministral_8b"], window_size=(15, 0)),
    "ministral3_tiny": tiny(PUBLISHED["ministral3_8b"], rope_original_max_position_embeddings=32, floor_scale=32),
    "mixtral_tiny": tiny(PUBLISHED["mixtral_8x7b"], num_moe_experts=4, moe_ffn_hidden_size=64),
}


MIXTRAL_EXPERTS = {
    "pre_mlp_layernorm.weight": same("post_attention_layernorm.weight"),
    "mlp.router.weight": same("block_sparse_moe.gate.weight"),
    "mlp.experts.linear_fc1.weight": experts(
        "block_sparse_moe.experts.{expert}.w1.weight", "block_sparse_moe.experts.{expert}.w3.weight"
    ),
    "mlp.experts.linear_fc2.weight": experts("block_sparse_moe.experts.{expert}.w2.weight"),
}

BETA = "llama_4_scaling_beta"
_UNTOLD: Config = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    BETA: 0.1,
}
"""Ministral 3's RoPE where a file has none."""


def _read_growing(left: Config, fields: dict[str, Any]) -> None:
    """RoPE, and queries that grow with their position, beyond the context that YaRN stretches."""
    keys = [key for key in ("rope_parameters", "rope_scaling") if left.get(key) is not None]
    if not keys:
        left["rope_parameters"], keys = _UNTOLD, ["rope_parameters"]
    betas = [_take_beta(left, key) for key in keys]
    if betas[0] != betas[-1]:
        raise Unsupported(f"rope_scaling.{BETA}", betas[-1], f"{betas[0]}, which rope_parameters says")
    fields |= rope.read(left)
    if fields["rope_scaling"] != "yarn":
        raise Unsupported(f"{keys[0]}.rope_type", fields["rope_scaling"], "'yarn', as published models have it")
    if betas[0]:
        fields |= {"attn_scale": betas[0], "attn_scale_all_blocks": True}
        fields["floor_scale"] = fields["rope_original_max_position_embeddings"]


def _take_beta(left: Config, key: str) -> float:
    """Leaves YaRN's own parameters; 0.0 where there are no parameters at all, which ``rope.read`` refuses."""
    if not isinstance(left[key], dict):
        return 0.0
    values = left[key] = {**left[key]}
    values.pop("max_position_embeddings", None)  # transformers reads the one beside the parameters
    beta = values.pop(BETA, None)
    if Span(0, 1e6).problem(BETA, beta):
        raise Unsupported(f"{key}.{BETA}", beta, "a number from 0")
    return float(beta)


def _write_growing(shape: GPTShape) -> Config:
    """As ``_read_growing``. transformers prefers rope_scaling where there is one."""
    written = rope.write(shape)
    parameters = written["rope_parameters"] | {BETA: shape.attn_scale}
    return written | {"rope_parameters": parameters, "rope_scaling": None}


ARCHITECTURES: dict[str, Architecture] = {
    "mistral": like_llama("MistralForCausalLM", parts=(HEADS, ROPE, tied(False), window(4096))),
    "ministral": like_llama("MinistralForCausalLM", parts=(HEADS, ROPE, tied(False), layer_windows(4096))),
    "ministral3": like_llama(
        "Ministral3ForCausalLM",
        defaults={"rms_norm_eps": 1e-5},
        parts=(HEADS, (_read_growing, _write_growing), tied(False), window(None)),
    ),
    "mixtral": like_llama(
        "MixtralForCausalLM",
        numbers=LOCAL_EXPERT_NUMBERS,
        defaults={
            "rms_norm_eps": 1e-5,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "router_aux_loss_coef": 0.001,
        },
        switches={"router_jitter_noise": (0.0,)},
        implied={"moe_router_load_balancing_type": "aux_loss"},
        aliases={"num_experts": "num_local_experts"},
        parts=(HEADS, ROPE, tied(False), window(None), (read_mixtral, write_mixtral)),
    ),
}

TABLES: dict[str, Table] = {
    "mistral": LLAMA,
    "ministral": LLAMA,
    "ministral3": LLAMA,
    "mixtral": Table(LLAMA_WHOLE, ATTENTION | MIXTRAL_EXPERTS),
}
