"""MiniMax-M2."""

import dataclasses
from typing import Any

from models.families.base import ATTENTION, LLAMA_WHOLE, LOCAL_EXPERT_NUMBERS, WIDE_HEADS, like_llama, llama, tiny
from models.families.mistral import MIXTRAL_EXPERTS
from models.hf.block_parts import rotary
from models.hf.config_parts import tied
from models.hf.keys import Architecture, Config, Unsupported, is_one_of
from models.hf.row_layouts import Table, same
from models.shapes import GPTShape
from models.spans import HEADS

PUBLISHED: dict[str, GPTShape] = {
    # https://huggingface.co/MiniMaxAI/MiniMax-M2: one norm over all queries and one over all keys, half of each head's
    # channels turned, sigmoid scores with a bias. Its config.json claims three depths of multi-token prediction, whose
    # weights are not published.
    "minimax_m2": dataclasses.replace(
        llama(62, 3072, 1536, num_attention_heads=48, num_query_groups=8),
        kv_channels=128,
        vocab_size=200_064,
        norm_epsilon=1e-6,
        qk_layernorm=True,
        qk_layernorm_full_width=True,
        rotary_base=5_000_000,
        rotary_percent=0.5,
        max_position_embeddings=196_608,
        num_moe_experts=256,
        moe_ffn_hidden_size=1536,
        moe_router_topk=8,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1e-3,
    ),
}

TINY: dict[str, GPTShape] = {
    "minimax_m2_tiny": tiny(PUBLISHED["minimax_m2"], num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=64),
}


_OTHER = {
    "attn_type_list": 1,
    "mlp_intermediate_size": None,
    "mtp_transformer_layers": None,
    "num_mtp_modules": None,
    "use_mtp": None,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
    "postnorm": False,
    "shared_intermediate_size": 0,
    "shared_moe_mode": None,
    "max_model_len": None,
    "output_router_logits": None,
    "router_aux_loss_coef": None,
    "scoring_func": "sigmoid",
    "use_qk_norm": True,
    "use_routing_bias": True,
    "qk_norm_type": "per_layer",
}
"""Keys of the published file that transformers' class does not read, and what they must be; None: whatever they are."""


def _read(left: Config, fields: dict[str, Any]) -> None:
    """Experts, the old name of partial rotary positions, and keys that say what is so anyway."""
    fields["moe_ffn_hidden_size"] = fields["ffn_hidden_size"]
    if (turned := left.pop("rotary_dim", None)) is not None:
        if HEADS.problem("rotary_dim", turned) or turned > fields["kv_channels"]:
            raise Unsupported("rotary_dim", turned, f"a number from 1 to head_dim, {fields['kv_channels']}")
        left.setdefault("partial_rotary_factor", turned / fields["kv_channels"])
    for key, expected in _OTHER.items():
        found = left.pop(key, None)
        values = found if isinstance(found, list) else [found]
        if expected is not None and not all(is_one_of(value, (expected, None)) for value in values):
            raise Unsupported(key, found, f"{expected!r}")


def _write(shape: GPTShape) -> Config:
    """As ``_read``."""
    return {"intermediate_size": shape.expert_ffn_hidden_size}


ARCHITECTURES: dict[str, Architecture] = {
    "minimax_m2": like_llama(
        "MiniMaxM2ForCausalLM",
        numbers=LOCAL_EXPERT_NUMBERS,
        defaults={"num_local_experts": 256, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.001},
        switches={"router_jitter_noise": (0.0,)},
        implied={
            "qk_layernorm": True,
            "qk_layernorm_full_width": True,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_load_balancing_type": "aux_loss",
        },
        aliases={"num_experts": "num_local_experts"},
        parts=(WIDE_HEADS, (_read, _write), rotary(theta=5_000_000.0, share=1.0), tied(False)),
    ),
}

TABLES: dict[str, Table] = {
    "minimax_m2": Table(
        LLAMA_WHOLE,
        ATTENTION | MIXTRAL_EXPERTS | {"mlp.router.expert_bias": same("block_sparse_moe.e_score_correction_bias")},
    ),
}
