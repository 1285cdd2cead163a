"""MiniMax-M2."""

import dataclasses

from models.families.base import llama, tiny
from models.shapes import GPTShape

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
