"""Named architectures, each with its source."""

import dataclasses
import difflib
from typing import Any

from models.shapes import GPTShape
from parallel.errors import UserError


def _gpt(num_layers: int, hidden_size: int, num_attention_heads: int, max_position_embeddings: int = 1024) -> GPTShape:
    """GPT-2's and GPT-3's family: LayerNorm, biases, learned positions, tanh GELU, tied embeddings.

    Source: https://github.com/openai/gpt-2, and the config.json of openai-community/gpt2* on Hugging Face
    (n_layer, n_embd, n_head; gelu_new; layer_norm_epsilon 1e-5; all dropouts 0.1).
    """
    return GPTShape(
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_hidden_size=4 * hidden_size,
        num_attention_heads=num_attention_heads,
        num_query_groups=num_attention_heads,
        kv_channels=hidden_size // num_attention_heads,
        vocab_size=50257,
        normalization="LayerNorm",
        activation="gelu",
        add_bias_linear=True,
        position_embedding_type="learned_absolute",
        max_position_embeddings=max_position_embeddings,
        untie_embeddings_and_output_weights=False,
        hidden_dropout=0.1,
        attention_dropout=0.1,
    )


def _llama(
    num_layers: int, hidden_size: int, ffn_hidden_size: int, num_attention_heads: int, num_query_groups: int
) -> GPTShape:
    """What nearly all later ones grew from: RMSNorm, SwiGLU, RoPE, no biases, an output layer of its own.

    With Llama 2's vocabulary, context and RoPE base. Source: "Llama 2" (arXiv:2307.09288), section 2.2, and the
    config.json of https://huggingface.co/meta-llama/Llama-2-7b-hf, -13b-hf and -70b-hf.
    """
    return GPTShape(
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_hidden_size=ffn_hidden_size,
        num_attention_heads=num_attention_heads,
        num_query_groups=num_query_groups,
        kv_channels=hidden_size // num_attention_heads,
        vocab_size=32000,
        normalization="RMSNorm",
        activation="swiglu",
        add_bias_linear=False,
        position_embedding_type="rope",
        max_position_embeddings=4096,
        untie_embeddings_and_output_weights=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def _llama3(num_layers: int, hidden_size: int, ffn_hidden_size: int, num_attention_heads: int) -> GPTShape:
    """Llama 3's family: 8 key-value heads, a vocabulary of 128,256, RoPE with base 500,000.

    Source: "The Llama 3 Herd of Models" (arXiv:2407.21783), table 3, and the config.json of each model card.
    """
    return dataclasses.replace(
        _llama(num_layers, hidden_size, ffn_hidden_size, num_attention_heads, num_query_groups=8),
        vocab_size=128256,
        rotary_base=500_000,
        max_position_embeddings=8192,
    )


def _llama31(shape: GPTShape, factor: float = 8.0, tied: bool = False) -> GPTShape:
    """Llama 3.1 and 3.2: positions stretched to 131,072 by the llama3 rule, from the 8,192 of Llama 3."""
    return dataclasses.replace(
        shape,
        rope_scaling="llama3",
        rope_scaling_factor=factor,
        rope_low_freq_factor=1.0,
        rope_high_freq_factor=4.0,
        rope_original_max_position_embeddings=8192,
        max_position_embeddings=131_072,
        untie_embeddings_and_output_weights=not tied,
    )


def _mixtral(
    num_layers: int, hidden_size: int, ffn_hidden_size: int, num_attention_heads: int, **changes: Any
) -> GPTShape:
    """Mixtral: eight experts in every block, of which a token meets two, weighted by a softmax over these two.

    Source: "Mixtral of Experts" (arXiv:2401.04088), section 2, and the config.json of the model card
    (router_aux_loss_coef).
    """
    shape = dataclasses.replace(
        _llama(num_layers, hidden_size, ffn_hidden_size, num_attention_heads, num_query_groups=8),
        rotary_base=1_000_000,
        num_moe_experts=8,
        moe_ffn_hidden_size=ffn_hidden_size,
        moe_router_topk=2,
        moe_router_load_balancing_type="aux_loss",
    )
    return dataclasses.replace(shape, **changes)


def _qwen2(
    num_layers: int, hidden_size: int, ffn_hidden_size: int, heads: tuple[int, int], tied: bool = False, **changes: Any
) -> GPTShape:
    """Qwen2 and Qwen2.5: biases on queries, keys and values only; RoPE with base 1,000,000. heads: (query, key-value).

    The smaller ones tie their embeddings. Rows of the embedding beyond the tokenizer's 151,646 ids differ by size.
    Source: "Qwen2 Technical Report" (arXiv:2407.10671), table 1, and the config.json of each model card.
    """
    shape = dataclasses.replace(
        _llama(num_layers, hidden_size, ffn_hidden_size, *heads),
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
        _llama(num_layers, hidden_size, ffn_hidden_size, *heads),
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


def _deepseek(
    num_layers: int, hidden_size: int, ffn_hidden_size: int, num_attention_heads: int, **changes: Any
) -> GPTShape:
    """What DeepSeek-V2 and V3 share: latent attention, experts beside shared ones, positions stretched by YaRN.

    The weights of chosen experts are those of a softmax over all, so they do not sum to 1, and each sequence is
    balanced. (V2's further balancing losses, over devices and their communication, are not in megatron-core.)
    Source: "DeepSeek-V2" (arXiv:2405.04434), sections 2.1, 2.2 and 3.1.2 and appendix B, and each config.json.
    """
    shape = dataclasses.replace(
        _llama(num_layers, hidden_size, ffn_hidden_size, num_attention_heads, num_attention_heads),
        kv_channels=128,  # not used by latent attention; Megatron's scripts say so
        vocab_size=102400,
        norm_epsilon=1e-6,
        qk_layernorm=True,
        multi_latent_attention=True,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_head_dim=128,
        qk_pos_emb_head_dim=64,
        v_head_dim=128,
        rope_scaling="yarn",
        rope_scaling_factor=40.0,
        rope_original_max_position_embeddings=4096,
        mscale=0.707,
        mscale_all_dim=0.707,
        max_position_embeddings=163_840,
        moe_layer_freq=f"[0]*1+[1]*{num_layers - 1}",
        moe_router_topk=6,
        moe_router_pre_softmax=True,
        moe_router_load_balancing_type="seq_aux_loss",
    )
    return dataclasses.replace(shape, **changes)


def _tiny(shape: GPTShape, **changes: Any) -> GPTShape:
    """The same architecture at laptop size: four blocks of width 64, four heads, the byte tokenizer's vocabulary.

    Without dropout, whose draws depend on the layout: what these are for is comparing layouts. Attention's heads are
    16 wide, or 32 where a family's heads are not hidden_size / num_attention_heads.
    """
    grouped = shape.num_query_groups < shape.num_attention_heads
    wide = shape.kv_channels * shape.num_attention_heads != shape.hidden_size and not shape.multi_latent_attention
    small = dataclasses.replace(
        shape,
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=176 if shape.gated else 256,
        num_attention_heads=4,
        num_query_groups=2 if grouped else 4,
        kv_channels=32 if wide else 16,
        vocab_size=257,
        max_position_embeddings=512,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    return dataclasses.replace(small, **changes)


def _tiny_deepseek(shape: GPTShape, **changes: Any) -> GPTShape:
    """One dense block and three of eight small experts; an original context that a short sequence exceeds."""
    return _tiny(
        shape,
        q_lora_rank=32 if shape.q_lora_rank else 0,
        kv_lora_rank=32,
        qk_head_dim=16,
        qk_pos_emb_head_dim=8,
        v_head_dim=16,
        rope_original_max_position_embeddings=32,
        num_moe_experts=8,
        moe_layer_freq="[0]*1+[1]*3",
        moe_ffn_hidden_size=32,
        moe_shared_expert_intermediate_size=32,
        moe_router_topk=2,
        moe_router_num_groups=2,
        moe_router_group_topk=1,
        **changes,
    )


PUBLISHED: dict[str, GPTShape] = {
    # https://huggingface.co/openai-community/gpt2, -medium, -large, -xl
    "gpt2": _gpt(12, 768, 12),
    "gpt2_medium": _gpt(24, 1024, 16),
    "gpt2_large": _gpt(36, 1280, 20),
    "gpt2_xl": _gpt(48, 1600, 25),
    # "Language Models are Few-Shot Learners" (arXiv:2005.14165), table 2.1 and section 2.1 (context 2048).
    # The paper alternates dense and banded sparse attention; here all is dense, as in Megatron's 175B runs.
    # It names no dropout: 0.1 is GPT-2's.
    "gpt3_175b": _gpt(96, 12288, 96, max_position_embeddings=2048),
    # https://huggingface.co/meta-llama/Llama-2-7b-hf, -13b-hf and -70b-hf
    "llama2_7b": _llama(32, 4096, 11008, 32, 32),
    "llama2_13b": _llama(40, 5120, 13824, 40, 40),
    "llama2_70b": _llama(80, 8192, 28672, 64, 8),
    # https://huggingface.co/meta-llama/Meta-Llama-3-8B and -70B
    "llama3_8b": _llama3(32, 4096, 14336, 32),
    "llama3_70b": _llama3(80, 8192, 28672, 64),
    # https://huggingface.co/meta-llama/Llama-3.1-8B, -70B, -405B
    "llama31_8b": _llama31(_llama3(32, 4096, 14336, 32)),
    "llama31_70b": _llama31(_llama3(80, 8192, 28672, 64)),
    "llama31_405b": _llama31(_llama3(126, 16384, 53248, 128)),
    # https://huggingface.co/meta-llama/Llama-3.2-1B and -3B
    "llama32_1b": _llama31(_llama3(16, 2048, 8192, 32), factor=32.0, tied=True),
    "llama32_3b": _llama31(_llama3(28, 3072, 8192, 24), factor=32.0, tied=True),
    # "Mistral 7B" (arXiv:2310.06825), table 1; https://huggingface.co/mistralai/Mistral-7B-v0.1.
    # A window of 4,096 tokens is the token's own and 4,095 before it.
    "mistral_7b": dataclasses.replace(
        _llama(32, 4096, 14336, 32, 8), window_size=(4095, 0), max_position_embeddings=32768
    ),
    # https://huggingface.co/mistralai/Mixtral-8x7B-v0.1 and Mixtral-8x22B-v0.1
    "mixtral_8x7b": _mixtral(32, 4096, 14336, 32, max_position_embeddings=32768, moe_aux_loss_coeff=0.02),
    "mixtral_8x22b": _mixtral(56, 6144, 16384, 48, max_position_embeddings=65536, moe_aux_loss_coeff=0.001),
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
    # https://huggingface.co/Qwen/Qwen3-30B-A3B and Qwen3-235B-A22B
    "qwen3_30b_a3b": _qwen3_moe(_qwen3(48, 2048, 6144, (32, 4)), moe_ffn_hidden_size=768),
    "qwen3_235b_a22b": _qwen3_moe(_qwen3(94, 4096, 12288, (64, 4)), moe_ffn_hidden_size=1536),
    # https://huggingface.co/deepseek-ai/DeepSeek-V2-Lite; arXiv:2405.04434, appendix B
    "deepseek_v2_lite": _deepseek(
        27,
        2048,
        10944,
        16,
        q_lora_rank=0,
        num_moe_experts=64,
        moe_ffn_hidden_size=1408,
        moe_shared_expert_intermediate_size=2 * 1408,
        moe_aux_loss_coeff=0.001,
    ),
    # https://huggingface.co/deepseek-ai/DeepSeek-V2; arXiv:2405.04434, section 3.1.2
    "deepseek_v2": _deepseek(
        60,
        5120,
        12288,
        128,
        num_moe_experts=160,
        moe_ffn_hidden_size=1536,
        moe_shared_expert_intermediate_size=2 * 1536,
        moe_router_num_groups=8,
        moe_router_group_topk=3,
        moe_router_topk_scaling_factor=16.0,
        moe_aux_loss_coeff=0.003,
    ),
    # https://huggingface.co/deepseek-ai/DeepSeek-V3; "DeepSeek-V3 Technical Report" (arXiv:2412.19437), sections 2 and
    # 4.2: sigmoid scores, balanced by a bias; the loss over a sequence only guards against extremes. The weight of
    # multi-token prediction is that of its first 10 of 14.8 T tokens (then 0.1).
    "deepseek_v3": _deepseek(
        61,
        7168,
        18432,
        128,
        vocab_size=129280,
        mscale=1.0,
        mscale_all_dim=1.0,
        num_moe_experts=256,
        moe_layer_freq="[0]*3+[1]*58",
        moe_ffn_hidden_size=2048,
        moe_shared_expert_intermediate_size=2048,
        moe_router_topk=8,
        moe_router_pre_softmax=False,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=1e-3,
        moe_router_num_groups=8,
        moe_router_group_topk=4,
        moe_router_topk_scaling_factor=2.5,
        moe_aux_loss_coeff=1e-4,
        mtp_num_layers=1,
        mtp_loss_scaling_factor=0.3,
    ),
}
"""Architectures of models that exist."""

TINY: dict[str, GPTShape] = {
    "gpt2_tiny": _tiny(PUBLISHED["gpt2"], max_position_embeddings=1024),
    "gpt3_tiny": _tiny(PUBLISHED["gpt3_175b"]),
    "llama2_tiny": _tiny(PUBLISHED["llama2_7b"]),
    # An original context of 64 puts wavelengths into all three bands of the llama3 rule at short sequences.
    "llama3_tiny": _tiny(PUBLISHED["llama31_8b"], rope_original_max_position_embeddings=64),
    "mistral_tiny": _tiny(PUBLISHED["mistral_7b"], window_size=(15, 0)),
    "mixtral_tiny": _tiny(PUBLISHED["mixtral_8x7b"], num_moe_experts=4, moe_ffn_hidden_size=64),
    "qwen2_tiny": _tiny(PUBLISHED["qwen2_7b"]),
    "qwen3_tiny": _tiny(PUBLISHED["qwen3_8b"]),
    "qwen3_moe_tiny": _tiny(PUBLISHED["qwen3_30b_a3b"], num_moe_experts=4, moe_ffn_hidden_size=64, moe_router_topk=2),
    "deepseek_v2_tiny": _tiny_deepseek(PUBLISHED["deepseek_v2"]),
    "deepseek_v3_tiny": _tiny_deepseek(PUBLISHED["deepseek_v3"]),
}
"""One sibling of each family that runs on a laptop in seconds."""


def _small_llama(hidden_size: int, ffn_hidden_size: int, vocab_size: int) -> GPTShape:
    """Four Llama-like blocks of four heads in two groups, for laptops; sizes are multiples of 16."""
    return dataclasses.replace(
        _llama(4, hidden_size, ffn_hidden_size, num_attention_heads=4, num_query_groups=2),
        vocab_size=vocab_size,
        max_position_embeddings=2048,
    )


SHAPES: dict[str, GPTShape] = {
    # Ours, for tests and the demo. Vocabularies: the byte tokenizer's 257; the demo's SentencePiece model's.
    "debug": _small_llama(hidden_size=64, ffn_hidden_size=176, vocab_size=257),
    "demo": _small_llama(hidden_size=128, ffn_hidden_size=352, vocab_size=2048),
    **TINY,
    **PUBLISHED,
}
"""Architectures by name. ``vocab_size`` is the published one; a run replaces it by its tokenizer's."""

ALIASES = {"llama3_1b": "llama32_1b", "llama3_3b": "llama32_3b", "llama3_405b": "llama31_405b"}
"""Sizes that exist in one release only, under the name of the generation."""


def unknown_shape(name: str) -> list[str]:
    """The problem of a name that is in neither table, with the nearest names; empty when it is known."""
    names = [*SHAPES, *ALIASES]
    if name in names:
        return []
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(near)}?" if near else f"There are: {', '.join(sorted(names))}."
    return [f'model.shape "{name}" is unknown. {hint}']


def named(name: str) -> GPTShape:
    """The published shape of this name. Raises UserError with the nearest names."""
    if problems := unknown_shape(name):
        raise UserError(problems[0])
    return SHAPES[ALIASES.get(name, name)]
