"""What families share: the Llama-like block that most grew from, and siblings of laptop size."""

import dataclasses
from typing import Any

from models.shapes import GPTShape


def llama(
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


def tiny(shape: GPTShape, **changes: Any) -> GPTShape:
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
