"""GPT-NeoX and Pythia."""

from models.families.base import tiny
from models.shapes import GPTShape


def _neox(num_layers: int, hidden_size: int, num_attention_heads: int, vocab_size: int) -> GPTShape:
    """Attention and MLP read one stream, each through its own LayerNorm; biases; RoPE on a quarter of each head.

    Source: "GPT-NeoX-20B" (arXiv:2204.06745), section 2, "Pythia" (arXiv:2304.01373), table 1, and the config.json of
    each model card.
    """
    return GPTShape(
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_hidden_size=4 * hidden_size,
        num_attention_heads=num_attention_heads,
        num_query_groups=num_attention_heads,
        kv_channels=hidden_size // num_attention_heads,
        vocab_size=vocab_size,
        normalization="LayerNorm",
        activation="gelu_exact",
        add_bias_linear=True,
        parallel_residual=True,
        position_embedding_type="rope",
        rotary_percent=0.25,
        max_position_embeddings=2048,
        untie_embeddings_and_output_weights=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        hf_model_type="gpt_neox",
    )


PUBLISHED: dict[str, GPTShape] = {
    # https://huggingface.co/EleutherAI/pythia-160m, -410m, -1b, -1.4b, -2.8b, -6.9b, -12b
    "pythia_160m": _neox(12, 768, 12, 50304),
    "pythia_410m": _neox(24, 1024, 16, 50304),
    "pythia_1b": _neox(16, 2048, 8, 50304),
    "pythia_1_4b": _neox(24, 2048, 16, 50304),
    "pythia_2_8b": _neox(32, 2560, 32, 50304),
    "pythia_6_9b": _neox(32, 4096, 32, 50432),
    "pythia_12b": _neox(36, 5120, 40, 50688),
}

TINY: dict[str, GPTShape] = {"pythia_tiny": tiny(PUBLISHED["pythia_1_4b"])}
