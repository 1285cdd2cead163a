"""GPT-2."""

import re

from models.hf.config_parts import read_gpt2, tied, write_gpt2
from models.hf.keys import Architecture
from models.hf.row_layouts import conv1d, conv1d_by_group, same
from models.hf.row_layouts import vocabulary as vocab
from models.hf.table import Table

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
