"""GLM-4, dense: that of 2025 (0414), and GLM-4-9B before it."""

import dataclasses

from models.families.base import ATTENTION, LLAMA_WHOLE, MLP, WIDE_HEADS, like_llama, llama, tiny
from models.hf.block_parts import bias_switches, rotary
from models.hf.config_parts import tied
from models.hf.keys import Architecture
from models.hf.row_layouts import Table, same
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


_GLM = like_llama(
    "GlmForCausalLM",
    defaults={"rms_norm_eps": 1.5625e-07},
    switches={"attention_out_bias": (None, False)},
    implied={"rotary_interleaved": True},
    parts=(
        WIDE_HEADS,
        rotary(share=0.5),
        tied(False),
        bias_switches("attention_bias", out="attention_out_bias", defaults={"attention_bias": True}),
    ),
)

ARCHITECTURES: dict[str, Architecture] = {
    "glm": _GLM,
    "glm4": dataclasses.replace(
        _GLM, model_class="Glm4ForCausalLM", implied={**_GLM.implied, "norm_placement": "both"}
    ),
}

GLM = ATTENTION | MLP | {"mlp.linear_fc1.weight": same("mlp.gate_up_proj.weight")}
GLM4 = GLM | {
    "self_attention.linear_proj.post_layernorm.weight": same("post_self_attn_layernorm.weight"),
    "mlp.linear_fc2.post_layernorm.weight": same("post_mlp_layernorm.weight"),
}

TABLES: dict[str, Table] = {"glm": Table(LLAMA_WHOLE, GLM), "glm4": Table(LLAMA_WHOLE, GLM4)}
