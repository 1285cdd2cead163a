"""StarCoder2."""

import dataclasses

from models.families.base import llama, tiny
from models.shapes import GPTShape


def _starcoder2(num_layers: int, hidden_size: int, heads: tuple[int, int], rotary_base: float, tied: bool) -> GPTShape:
    """LayerNorm, biases, tanh GELU, RoPE, windows of 4,096 tokens. heads: (query, key-value).

    Source: "StarCoder 2 and The Stack v2" (arXiv:2402.19173), table 6, and the config.json of each model card.
    """
    return dataclasses.replace(
        llama(num_layers, hidden_size, 4 * hidden_size, *heads),
        vocab_size=49152,
        normalization="LayerNorm",
        activation="gelu",
        add_bias_linear=True,
        rotary_base=rotary_base,
        window_size=(4095, 0),
        max_position_embeddings=16384,
        untie_embeddings_and_output_weights=not tied,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        hf_model_type="starcoder2",
    )


PUBLISHED: dict[str, GPTShape] = {
    # https://huggingface.co/bigcode/starcoder2-3b, -7b and -15b
    "starcoder2_3b": _starcoder2(30, 3072, (24, 2), rotary_base=999999.4420358813, tied=True),
    "starcoder2_7b": _starcoder2(32, 4608, (36, 4), rotary_base=1_000_000, tied=True),
    "starcoder2_15b": _starcoder2(40, 6144, (48, 4), rotary_base=100_000, tied=False),
}

TINY: dict[str, GPTShape] = {"starcoder2_tiny": tiny(PUBLISHED["starcoder2_7b"], window_size=(15, 0))}
