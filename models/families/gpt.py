"""GPT-2 and GPT-3."""

from models.families.base import tiny
from models.shapes import GPTShape


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
}

TINY: dict[str, GPTShape] = {
    "gpt2_tiny": tiny(PUBLISHED["gpt2"], max_position_embeddings=1024),
    "gpt3_tiny": tiny(PUBLISHED["gpt3_175b"]),
}
