"""Architectures that published tables name and that this project does not train, as shapes near enough.

By the config.json of each model card, where nothing else is said. State-space layers and linear attention are counted
as attention to 4,096 keys: their scans outrun FlashAttention 2 from 2,048 on (arXiv:2405.21060, figure 10), and today's
attention is twice as fast. Blocks are halved where a card counts a mixer and an MLP apart. GPT-2's kind of models, and
Llama's, need no more than a line of ``dimensions.csv``.
"""

import dataclasses

from models.families import SHAPES
from models.shapes import GPTShape


def _like(name: str, **changes: object) -> GPTShape:
    return dataclasses.replace(SHAPES[name], **changes)  # type: ignore[arg-type]


_GPT_OSS = _like(
    "qwen3_235b_a22b", num_layers=36, hidden_size=2880, ffn_hidden_size=2880, num_attention_heads=64,
    num_query_groups=8, kv_channels=64, vocab_size=201088, num_moe_experts=128, moe_ffn_hidden_size=2880,
    moe_router_topk=4, window_size=(127, 0), window_attn_skip_freq="2", add_bias_linear=True,
)  # fmt: skip
# The Nemotron 3: hybrids of state-space layers, layers of experts and few attention layers, as pairs of a mixer and
# experts; what the mixers' projections have more than attention's is in the shared experts' width, so that FLOPs per
# token are those of NVIDIA's tables (Super 85e9, Ultra 363e9, Nano 22e9, Lightning, which is Nano with two depths of
# multi-token prediction, 28e9). Super and Ultra have two as well, and state-space layers twice as wide as attention:
# 8,192 keys. DeepSeek-V4 Flash: what its table computes more (91e9) is in the shared experts, too.
_NANO = _like(
    "qwen3_30b_a3b", num_layers=26, hidden_size=2688, num_attention_heads=32, num_query_groups=2, vocab_size=131072,
    activation="squared_relu", num_moe_experts=128, moe_ffn_hidden_size=1856, moe_shared_expert_intermediate_size=3712,
    moe_router_topk=6, window_size=(4095, 0), window_attn_skip_freq="4",
)  # fmt: skip
BENCHMARKED: dict[str, GPTShape] = {
    "gpt_oss_120b": _GPT_OSS,
    "kimi_k2": _like(
        "deepseek_v3", num_attention_heads=64, num_query_groups=64, vocab_size=163840, num_moe_experts=384,
        moe_layer_freq="[0]*1+[1]*60", moe_router_num_groups=0, moe_router_group_topk=0, mtp_num_layers=0,
    ),
    "nemotron_3_nano": _NANO,
    "nemotron_3_5_lightning": dataclasses.replace(_NANO, mtp_num_layers=2),
    "nemotron_3_super": _like(
        "qwen3_235b_a22b", num_layers=40, hidden_size=4096, num_attention_heads=32, num_query_groups=2,
        vocab_size=131072, activation="squared_relu", num_moe_experts=128, moe_ffn_hidden_size=2496,
        moe_shared_expert_intermediate_size=12736, moe_router_topk=6, window_size=(8191, 0), window_attn_skip_freq="5",
        mtp_num_layers=2,
    ),
    "nemotron_3_ultra": _like(
        "qwen3_235b_a22b", num_layers=48, hidden_size=8192, num_attention_heads=64, num_query_groups=2,
        vocab_size=131072, activation="squared_relu", num_moe_experts=128, moe_ffn_hidden_size=4672,
        moe_shared_expert_intermediate_size=28992, moe_router_topk=6, window_size=(8191, 0), window_attn_skip_freq="5",
        mtp_num_layers=2,
    ),
    "deepseekv4_flash": _like(
        "deepseek_v3", num_layers=43, hidden_size=4096, num_attention_heads=64, num_query_groups=64,
        moe_layer_freq="1", num_moe_experts=256, moe_ffn_hidden_size=2048, moe_shared_expert_intermediate_size=4544,
        moe_router_topk=6, moe_router_num_groups=0, moe_router_group_topk=0, mtp_num_layers=1,
    ),
    "qwen2_57b_a14b": _like(
        "qwen3_30b_a3b", num_layers=28, hidden_size=3584, num_attention_heads=28, num_query_groups=4,
        vocab_size=151936, num_moe_experts=64, moe_ffn_hidden_size=2560,
        moe_shared_expert_intermediate_size=20480, moe_router_topk=8,
    ),
    "gpt_oss_20b": dataclasses.replace(_GPT_OSS, num_layers=24, num_moe_experts=32),
    # Three layers of four are Gated DeltaNet. Its gates, and attention's, are in the shared expert's width.
    "qwen3_next_80b_a3b": _like(
        "qwen3_30b_a3b", num_attention_heads=16, num_query_groups=2, kv_channels=256, num_moe_experts=512,
        moe_ffn_hidden_size=512, moe_shared_expert_intermediate_size=2560, moe_router_topk=10, window_size=(4095, 0),
        window_attn_skip_freq="4",
    ),
    # Attention in chunks of 8,192 tokens but in every fourth layer; Maverick has experts in every second one.
    "llama4_scout": _like(
        "llama31_70b", num_layers=48, hidden_size=5120, ffn_hidden_size=16384, num_attention_heads=40,
        vocab_size=202048, num_moe_experts=16, moe_ffn_hidden_size=8192, moe_shared_expert_intermediate_size=8192,
        moe_router_topk=1, moe_router_score_function="sigmoid", window_size=(8191, 0), window_attn_skip_freq="4",
    ),
    "llama4_maverick": _like(
        "llama31_70b", num_layers=48, hidden_size=5120, ffn_hidden_size=16384, num_attention_heads=40,
        vocab_size=202048, num_moe_experts=128, moe_layer_freq="[0,1]*24", moe_ffn_hidden_size=8192,
        moe_shared_expert_intermediate_size=8192, moe_router_topk=1, moe_router_score_function="sigmoid",
        window_size=(8191, 0), window_attn_skip_freq="4",
    ),
    # https://github.com/xai-org/grok-1
    "grok_1": _like(
        "mixtral_8x22b", num_layers=64, ffn_hidden_size=32768, moe_ffn_hidden_size=32768, vocab_size=131072,
        activation="geglu", untie_embeddings_and_output_weights=False,
    ),
    # arXiv:2504.14960, section 4.1: Mixtral with eight times as many experts of an eighth, and Llama 3 with eight.
    "mixtral_8x22b_g8t8": _like("mixtral_8x22b", num_moe_experts=64, moe_ffn_hidden_size=2048, moe_router_topk=8),
    "llama3_8x70b": _like("llama3_70b", num_moe_experts=8, moe_ffn_hidden_size=28672, moe_router_topk=2),
    # arXiv:2204.02311, table 1 and section 2: SwiGLU, one key-value head of 256, tied embeddings.
    "palm_540b": _like(
        "llama3_70b", num_layers=118, hidden_size=18432, ffn_hidden_size=73728, num_attention_heads=48,
        num_query_groups=1, kv_channels=256, vocab_size=256000, untie_embeddings_and_output_weights=False,
    ),
}  # fmt: skip

LATENT_EXPERTS: dict[str, dict[str, int]] = {
    # As they are: many small experts in a space of a quarter of the hidden size.
    "nemotron_3_super": {"experts": 512, "topk": 22, "expert_ffn": 2688, "expert_hidden": 1024},
    "nemotron_3_ultra": {"experts": 512, "topk": 22, "expert_ffn": 5120, "expert_hidden": 2048},
}  # fmt: skip
