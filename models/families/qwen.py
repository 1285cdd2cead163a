"""Qwen1.5-MoE, Qwen2, Qwen2.5 and Qwen3, dense and of experts."""

import dataclasses
from typing import Any

from models.families.base import (
    ATTENTION,
    ATTENTION_BIAS,
    EXPERT_NUMBERS,
    EXPERTS,
    GATED_SHARED_EXPERT,
    HEADS,
    LLAMA,
    LLAMA_WHOLE,
    MLP,
    QWEN_EXPERT_NUMBERS,
    ROPE,
    SWITCHED_WINDOWS,
    WIDE_HEADS,
    WINDOWS_EVERYWHERE,
    like_llama,
    llama,
    tiny,
)
from models.hf.block_parts import no_windows
from models.hf.config_parts import qwen_moe, tied
from models.hf.keys import Architecture
from models.hf.row_layouts import Table
from models.shapes import GPTShape


def _qwen2(
    num_layers: int, hidden_size: int, ffn_hidden_size: int, heads: tuple[int, int], tied: bool = False, **changes: Any
) -> GPTShape:
    """Qwen2 and Qwen2.5: biases on queries, keys and values only; RoPE with base 1,000,000. heads: (query, key-value).

    The smaller ones tie their embeddings. Rows of the embedding beyond the tokenizer's 151,646 ids differ by size.
    Source: "Qwen2 Technical Report" (arXiv:2407.10671), table 1, and the config.json of each model card.
    """
    shape = dataclasses.replace(
        llama(num_layers, hidden_size, ffn_hidden_size, *heads),
        vocab_size=151936 if tied else 152064,
        add_qkv_bias=True,
        norm_epsilon=1e-6,
        rotary_base=1_000_000,
        max_position_embeddings=131_072,
        untie_embeddings_and_output_weights=not tied,
    )
    return dataclasses.replace(shape, **changes)


def _qwen3(
    num_layers: int, hidden_size: int, ffn_hidden_size: int, heads: tuple[int, int], tied: bool = False
) -> GPTShape:
    """Qwen3: no biases, a norm on the queries and keys of each head, heads of 128 whatever the hidden size.

    Source: "Qwen3 Technical Report" (arXiv:2505.09388), table 1, and the config.json of each model card.
    """
    return dataclasses.replace(
        llama(num_layers, hidden_size, ffn_hidden_size, *heads),
        kv_channels=128,
        vocab_size=151936,
        qk_layernorm=True,
        norm_epsilon=1e-6,
        rotary_base=1_000_000,
        max_position_embeddings=40960,
        untie_embeddings_and_output_weights=not tied,
    )


def _qwen3_moe(shape: GPTShape, moe_ffn_hidden_size: int) -> GPTShape:
    """Qwen3's mixtures: 128 experts in every block, of which a token meets 8; balanced over the global batch.

    Source: arXiv:2505.09388, table 2 and section 2, and the config.json of each model card (norm_topk_prob: weights
    sum to 1; router_aux_loss_coef 1e-3).
    """
    return dataclasses.replace(
        shape,
        num_moe_experts=128,
        moe_ffn_hidden_size=moe_ffn_hidden_size,
        moe_router_topk=8,
        moe_router_load_balancing_type="global_aux_loss",
        moe_aux_loss_coeff=1e-3,
    )


def _qwen2_moe(shape: GPTShape, **changes: Any) -> GPTShape:
    """Qwen2's mixtures: shared experts beside them, as wide as four or eight and weighed by a gate of their own; the
    weights of chosen experts do not sum to 1.

    Source: "Qwen2 Technical Report" (arXiv:2407.10671), section 2.2.2, and the config.json of each model card.
    """
    settings: dict[str, Any] = {
        "vocab_size": 151936,
        "moe_shared_expert_gate": True,
        "moe_router_pre_softmax": True,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-3,
    }
    return dataclasses.replace(shape, **settings | changes)


PUBLISHED: dict[str, GPTShape] = {
    # https://huggingface.co/Qwen/Qwen2-0.5B, -1.5B, -7B, -72B
    "qwen2_0_5b": _qwen2(24, 896, 4864, (14, 2), tied=True),
    "qwen2_1_5b": _qwen2(28, 1536, 8960, (12, 2), tied=True),
    "qwen2_7b": _qwen2(28, 3584, 18944, (28, 4)),
    "qwen2_72b": _qwen2(80, 8192, 29568, (64, 8), norm_epsilon=1e-5),
    # https://huggingface.co/Qwen/Qwen2.5-0.5B, -1.5B, -3B, -7B, -14B, -32B, -72B
    "qwen25_0_5b": _qwen2(24, 896, 4864, (14, 2), tied=True, max_position_embeddings=32768),
    "qwen25_1_5b": _qwen2(28, 1536, 8960, (12, 2), tied=True),
    "qwen25_3b": _qwen2(36, 2048, 11008, (16, 2), tied=True, max_position_embeddings=32768),
    "qwen25_7b": _qwen2(28, 3584, 18944, (28, 4)),
    "qwen25_14b": _qwen2(48, 5120, 13824, (40, 8), norm_epsilon=1e-5),
    "qwen25_32b": _qwen2(64, 5120, 27648, (40, 8), norm_epsilon=1e-5),
    "qwen25_72b": _qwen2(80, 8192, 29568, (64, 8), norm_epsilon=1e-5),
    # https://huggingface.co/Qwen/Qwen3-0.6B, -1.7B, -4B, -8B, -14B, -32B
    "qwen3_0_6b": _qwen3(28, 1024, 3072, (16, 8), tied=True),
    "qwen3_1_7b": _qwen3(28, 2048, 6144, (16, 8), tied=True),
    "qwen3_4b": _qwen3(36, 2560, 9728, (32, 8), tied=True),
    "qwen3_8b": _qwen3(36, 4096, 12288, (32, 8)),
    "qwen3_14b": _qwen3(40, 5120, 17408, (40, 8)),
    "qwen3_32b": _qwen3(64, 5120, 25600, (64, 8)),
    # https://huggingface.co/Qwen/Qwen1.5-MoE-A2.7B and Qwen2-57B-A14B
    "qwen15_moe_a2_7b": _qwen2_moe(
        _qwen2(24, 2048, 5632, (16, 16), max_position_embeddings=8192),
        num_moe_experts=60,
        moe_router_topk=4,
        moe_ffn_hidden_size=1408,
        moe_shared_expert_intermediate_size=5632,
    ),
    "qwen2_57b_a14b": _qwen2_moe(
        _qwen2(28, 3584, 18944, (28, 4)),
        num_moe_experts=64,
        moe_router_topk=8,
        moe_ffn_hidden_size=2560,
        moe_shared_expert_intermediate_size=20480,
    ),
    # https://huggingface.co/Qwen/Qwen3-30B-A3B and Qwen3-235B-A22B
    "qwen3_30b_a3b": _qwen3_moe(_qwen3(48, 2048, 6144, (32, 4)), moe_ffn_hidden_size=768),
    "qwen3_235b_a22b": _qwen3_moe(_qwen3(94, 4096, 12288, (64, 4)), moe_ffn_hidden_size=1536),
}

TINY: dict[str, GPTShape] = {
    "qwen2_tiny": tiny(PUBLISHED["qwen2_7b"]),
    "qwen2_moe_tiny": tiny(
        PUBLISHED["qwen2_57b_a14b"],
        num_moe_experts=4,
        moe_router_topk=2,
        moe_ffn_hidden_size=64,
        moe_shared_expert_intermediate_size=96,
    ),
    "qwen3_tiny": tiny(PUBLISHED["qwen3_8b"]),
    "qwen3_moe_tiny": tiny(PUBLISHED["qwen3_30b_a3b"], num_moe_experts=4, moe_ffn_hidden_size=64, moe_router_topk=2),
}


ARCHITECTURES: dict[str, Architecture] = {
    "qwen2": like_llama(
        "Qwen2ForCausalLM",
        switches={"use_mrope": (None, False)},
        implied={"add_qkv_bias": True},
        parts=(HEADS, ROPE, tied(False), SWITCHED_WINDOWS),
    ),
    "qwen2_moe": like_llama(
        "Qwen2MoeForCausalLM",
        numbers=QWEN_EXPERT_NUMBERS,
        defaults={
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts_per_tok": 4,
            "router_aux_loss_coef": 0.001,
        },
        switches={"qkv_bias": (True,)},
        implied={"add_qkv_bias": True, "moe_shared_expert_gate": True, "moe_router_load_balancing_type": "aux_loss"},
        parts=(HEADS, ROPE, tied(False), no_windows(), qwen_moe(60)),
    ),
    "qwen3": like_llama(
        "Qwen3ForCausalLM",
        implied={"qk_layernorm": True},
        parts=(WIDE_HEADS, ROPE, tied(False), SWITCHED_WINDOWS, ATTENTION_BIAS),
    ),
    "qwen3_moe": like_llama(
        "Qwen3MoeForCausalLM",
        numbers={"moe_intermediate_size": "moe_ffn_hidden_size"} | EXPERT_NUMBERS,
        defaults={"moe_intermediate_size": 768, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.001},
        implied={"qk_layernorm": True, "moe_router_load_balancing_type": "global_aux_loss"},
        aliases={"num_experts": "num_local_experts"},
        parts=(WIDE_HEADS, ROPE, tied(False), WINDOWS_EVERYWHERE, ATTENTION_BIAS, qwen_moe(128)),
    ),
}

TABLES: dict[str, Table] = {
    "qwen2": LLAMA,
    "qwen2_moe": Table(LLAMA_WHOLE, ATTENTION | MLP | EXPERTS | GATED_SHARED_EXPERT),
    "qwen3": LLAMA,
    "qwen3_moe": Table(LLAMA_WHOLE, ATTENTION | MLP | EXPERTS),
}
