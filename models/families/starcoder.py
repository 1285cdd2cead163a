"""StarCoder2."""

import dataclasses
from typing import Any

from models.families.base import (
    ATTENTION,
    LAYERNORM_WHOLE,
    LLAMA_HEADS,
    NORM_BIASES,
    ROPE,
    like_llama,
    linear_biases,
    llama,
    tiny,
)
from models.hf.block_parts import equal_dropouts
from models.hf.config_parts import tied, window
from models.hf.keys import Architecture
from models.hf.row_layouts import Table, same
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


_UNREAD: dict[str, tuple[Any, ...]] = {
    "activation_function": (None, "gelu", "gelu_pytorch_tanh"),
    "attention_softmax_in_fp32": (None, True),
    "scale_attention_softmax_in_fp32": (None, True),
    "scale_attn_weights": (None, True),
    "layer_norm_epsilon": (None, 1e-5),
    "mlp_type": (None, "default"),
    "norm_type": (None, "layer_norm"),
}
"""Keys of published files that transformers does not read."""


ARCHITECTURES: dict[str, Architecture] = {
    "starcoder2": like_llama(
        "Starcoder2ForCausalLM",
        without=("rms_norm_eps", "hidden_dropout", "add_bias_linear"),
        numbers={"norm_epsilon": "norm_epsilon"},
        defaults={"initializer_range": 0.018042, "norm_epsilon": 1e-5},
        switches={"hidden_act": ("gelu_pytorch_tanh", "gelu_new")} | _UNREAD,
        implied={"normalization": "LayerNorm", "activation": "gelu"},
        parts=(
            LLAMA_HEADS,
            ROPE,
            tied(True),
            window(None),
            linear_biases(True),
            equal_dropouts("residual_dropout", ("embedding_dropout",), 0.0),
        ),
    ),
}

MLP = {
    "mlp.linear_fc1.layer_norm_weight": same("post_attention_layernorm.weight"),
    "mlp.linear_fc1.weight": same("mlp.c_fc.weight"),
    "mlp.linear_fc1.bias": same("mlp.c_fc.bias"),
    "mlp.linear_fc2.weight": same("mlp.c_proj.weight"),
    "mlp.linear_fc2.bias": same("mlp.c_proj.bias"),
}

TABLES: dict[str, Table] = {"starcoder2": Table(LAYERNORM_WHOLE, ATTENTION | NORM_BIASES | MLP)}
