"""Nemotron-H, Nemotron Nano 2 and Nemotron 3: Mamba-2 mixers, MLPs and little attention."""

import dataclasses
from typing import Any

from models.families.base import llama, tiny
from models.shapes import GPTShape


def _nemotron_h(pattern: str, hidden_size: int, ffn_hidden_size: int, heads: int, **changes: Any) -> GPTShape:
    """One letter a layer. Squared ReLU, no biases, no positions: the mixers tell the order. Heads of attention in 8
    groups, of 128 channels; Mamba heads in 8 groups.

    Source: "Nemotron-H" (arXiv:2504.03624), section 2.1 and table 1, and the config.json of each model card.
    """
    shape = dataclasses.replace(
        llama(len(pattern), hidden_size, ffn_hidden_size, heads, num_query_groups=8),
        hybrid_layer_pattern=pattern,
        kv_channels=128,
        activation="squared_relu",
        vocab_size=131072,
        position_embedding_type="none",
        max_position_embeddings=8192,
        mamba_num_heads=128,
        mamba_num_groups=8,
    )
    return dataclasses.replace(shape, **changes)


def _experts(shape: GPTShape) -> GPTShape:
    """Nemotron 3's: 128 experts of which a token meets 6, beside a shared one; balanced by a bias, as DeepSeek-V3's.

    Source: "Nemotron 3 Nano" (technical report, 2025), section 2, and the config.json of the model card.
    """
    return dataclasses.replace(
        shape,
        num_moe_experts=128,
        moe_ffn_hidden_size=1856,
        moe_shared_expert_intermediate_size=3712,
        moe_router_topk=6,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_topk_scaling_factor=2.5,
        moe_router_load_balancing_type="seq_aux_loss",
        moe_aux_loss_coeff=1e-4,
    )


def _tiny_nemotron_h(pattern: str, shape: GPTShape, **changes: Any) -> GPTShape:
    return tiny(
        shape,
        hybrid_layer_pattern=pattern,
        mamba_num_heads=8,
        mamba_head_dim=16,
        mamba_num_groups=2,
        mamba_state_dim=16,
        **changes,
    )


PUBLISHED: dict[str, GPTShape] = {
    # https://huggingface.co/nvidia/Nemotron-H-8B-Base-8K, -47B-Base-8K, -56B-Base-8K
    "nemotron_h_8b": _nemotron_h("M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", 4096, 21504, 32),
    "nemotron_h_47b": _nemotron_h(
        "M-M-M-M-M-M-M-M-M*-M-M-M-M-M-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-M-M---MM---M-M*-M-M-M-M-M-",
        8192,
        30720,
        64,
        mamba_num_heads=256,
        mamba_state_dim=256,
    ),
    "nemotron_h_56b": _nemotron_h(
        "M-M-M-M*-" + 9 * "M-M-M-M-M*-" + "M-M-M-M-M-", 8192, 32768, 64, mamba_num_heads=256, mamba_state_dim=256
    ),
    # https://huggingface.co/nvidia/NVIDIA-Nemotron-Nano-9B-v2 (arXiv:2508.14444)
    "nemotron_nano_9b_v2": _nemotron_h(
        "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        4480,
        15680,
        40,
        mamba_head_dim=80,
        max_position_embeddings=131_072,
    ),
    # https://huggingface.co/nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16
    "nemotron3_nano_30b_a3b": _experts(
        _nemotron_h(
            "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            2688,
            1856,
            32,
            num_query_groups=2,
            mamba_num_heads=64,
            max_position_embeddings=262_144,
        )
    ),
}

TINY: dict[str, GPTShape] = {
    "nemotron_h_tiny": _tiny_nemotron_h("M-*-", PUBLISHED["nemotron_h_8b"]),
    "nemotron3_tiny": _tiny_nemotron_h(
        "MEM*",
        PUBLISHED["nemotron3_nano_30b_a3b"],
        num_moe_experts=4,
        moe_ffn_hidden_size=64,
        moe_shared_expert_intermediate_size=64,
        moe_router_topk=2,
    ),
}
