"""ERNIE-4.5, of experts."""

import dataclasses

from models.families.base import llama, tiny
from models.shapes import GPTShape

PUBLISHED: dict[str, GPTShape] = {
    # https://huggingface.co/baidu/ERNIE-4.5-21B-A3B-Base-PT; "ERNIE 4.5 Technical Report", section 2: experts chosen by
    # the sum of softmax and a bias, weights that sum to 1; neighbouring channels turned together.
    "ernie45_21b_a3b": dataclasses.replace(
        llama(28, 2560, 12288, num_attention_heads=20, num_query_groups=4),
        vocab_size=103_424,
        rotary_base=500_000,
        rotary_interleaved=True,
        max_position_embeddings=131_072,
        untie_embeddings_and_output_weights=False,
        num_moe_experts=64,
        moe_layer_freq="[0]*1+[1]*27",
        moe_ffn_hidden_size=1536,
        moe_shared_expert_intermediate_size=2 * 1536,
        moe_router_topk=6,
        moe_router_enable_expert_bias=True,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1e-3,
    ),
}

TINY: dict[str, GPTShape] = {
    "ernie45_moe_tiny": tiny(
        PUBLISHED["ernie45_21b_a3b"],
        num_moe_experts=6,
        moe_layer_freq="[0]*1+[1]*3",
        moe_router_topk=3,
        moe_ffn_hidden_size=40,
        moe_shared_expert_intermediate_size=80,
    ),
}
