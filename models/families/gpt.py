"""GPT-2 and GPT-3."""

import re

from models.families.base import tiny
from models.hf.config_parts import read_gpt2, tied, write_gpt2
from models.hf.keys import Architecture
from models.hf.row_layouts import Table, conv1d, conv1d_by_group, same
from models.hf.row_layouts import vocabulary as vocab
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


GPT2_WHOLE = {
    "word_embeddings.weight": vocab("transformer.wte.weight"),
    "position_embeddings.weight": same("transformer.wpe.weight"),
    "final_layernorm.weight": same("transformer.ln_f.weight"),
    "final_layernorm.bias": same("transformer.ln_f.bias"),
    "output_layer.weight": vocab("lm_head.weight"),
}

GPT2_BLOCK = {
    f"{ours}{part}": rule(f"{theirs}{part}")
    for ours, rule, theirs in (
        ("self_attention.linear_qkv.layer_norm_", same, "ln_1."),
        ("self_attention.linear_qkv.", conv1d_by_group, "attn.c_attn."),
        ("self_attention.linear_proj.", conv1d, "attn.c_proj."),
        ("mlp.linear_fc1.layer_norm_", same, "ln_2."),
        ("mlp.linear_fc1.", conv1d, "mlp.c_fc."),
        ("mlp.linear_fc2.", conv1d, "mlp.c_proj."),
    )
    for part in ("weight", "bias")
}


ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": Architecture(
        model_class="GPT2LMHeadModel",
        numbers={
            "vocab_size": "vocab_size",
            "n_embd": "hidden_size",
            "n_layer": "num_layers",
            "n_head": "num_attention_heads",
            "n_positions": "max_position_embeddings",
            "layer_norm_epsilon": "norm_epsilon",
            "initializer_range": "init_method_std",
            "resid_pdrop": "hidden_dropout",
            "attn_pdrop": "attention_dropout",
        },
        defaults={"initializer_range": 0.02, "layer_norm_epsilon": 1e-5, "resid_pdrop": 0.1, "attn_pdrop": 0.1},
        switches={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "add_cross_attention": (False,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "scale_attn_weights": (True,),
        },
        implied={
            "normalization": "LayerNorm",
            "activation": "gelu",
            "add_bias_linear": True,
            "position_embedding_type": "learned_absolute",
        },
        aliases={
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
        parts=((read_gpt2, write_gpt2), tied(True)),
    ),
}

TABLES: dict[str, Table] = {
    "gpt2": Table(
        GPT2_WHOLE,
        GPT2_BLOCK,
        prefix="transformer.h.",
        bare="transformer.",
        computed=re.compile(r"^transformer\.h\.\d+\.attn\.(bias|masked_bias)$"),
    ),
}
