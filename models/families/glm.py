"""GLM-4, dense."""

import dataclasses

from models.families.base import llama, tiny
from models.shapes import GPTShape


def _glm4(
    num_layers: int, hidden_size: int, ffn_hidden_size: int, num_attention_heads: int, *, biases: bool
) -> GPTShape:
    """Norms before and behind attention and MLP; RoPE turns neighbouring channels of half of each head.

    Source: the config.json of each model card.
    """
    return dataclasses.replace(
        llama(num_layers, hidden_size, ffn_hidden_size, num_attention_heads, num_query_groups=2),
        vocab_size=151_552,
        norm_placement="both",
        add_qkv_bias=biases,
        rotary_percent=0.5,
        rotary_interleaved=True,
        max_position_embeddings=32768,
        hf_model_type="glm4",
    )


PUBLISHED: dict[str, GPTShape] = {
    # https://huggingface.co/zai-org/GLM-4-9B-0414 and GLM-4-32B-0414
    "glm4_9b": _glm4(40, 4096, 13696, 32, biases=True),
    "glm4_32b": _glm4(61, 6144, 23040, 48, biases=False),
}

TINY: dict[str, GPTShape] = {"glm4_tiny": tiny(PUBLISHED["glm4_9b"])}
