"""Mamba-2: state space models without attention or MLP."""

import dataclasses

from models.families.base import llama, tiny
from models.shapes import GPTShape


def _mamba2(num_layers: int, hidden_size: int) -> GPTShape:
    """state-spaces' models: mixers alone, of heads of 64 channels with states of 128, all heads in one group.

    One group cannot be split, so TP has to be 1: megatron-core gives each TP rank groups of its own. The tables are of
    GPT-NeoX's tokenizer, rounded up to a multiple of 16. Source: "Transformers are SSMs" (arXiv:2405.21060), appendix
    D.2 and table 9, and each config.json of https://huggingface.co/state-spaces (d_model, n_layer).
    """
    heads = 2 * hidden_size // 64
    return dataclasses.replace(
        llama(num_layers, hidden_size, 4 * hidden_size, heads, heads),
        kv_channels=64,
        hybrid_layer_pattern="M" * num_layers,
        mamba_num_heads=heads,
        mamba_num_groups=1,
        vocab_size=50288,
        position_embedding_type="none",
        max_position_embeddings=2048,
        untie_embeddings_and_output_weights=False,
    )


PUBLISHED: dict[str, GPTShape] = {
    # https://huggingface.co/state-spaces/mamba2-130m, -370m, -780m, -1.3b, -2.7b
    "mamba2_130m": _mamba2(24, 768),
    "mamba2_370m": _mamba2(48, 1024),
    "mamba2_780m": _mamba2(48, 1536),
    "mamba2_1_3b": _mamba2(48, 2048),
    "mamba2_2_7b": _mamba2(64, 2560),
    # https://huggingface.co/mistralai/Mamba-Codestral-7B-v0.1
    "mamba_codestral_7b": dataclasses.replace(
        _mamba2(64, 4096), mamba_num_groups=8, vocab_size=32768, untie_embeddings_and_output_weights=True
    ),
}

TINY: dict[str, GPTShape] = {
    "mamba2_tiny": tiny(
        PUBLISHED["mamba_codestral_7b"],
        num_query_groups=4,
        hybrid_layer_pattern="MMMM",
        mamba_num_heads=8,
        mamba_head_dim=16,
        mamba_num_groups=2,
        mamba_state_dim=16,
    ),
}
