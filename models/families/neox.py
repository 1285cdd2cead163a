"""GPT-NeoX and Pythia."""

import re
from typing import Any

from models.families.base import tiny
from models.hf import rope
from models.hf.block_parts import activation, bias_switches
from models.hf.config_parts import tied
from models.hf.keys import Architecture, Config, Unsupported, take_bool
from models.hf.row_layouts import Table, same
from models.hf.row_layouts import vocabulary as vocab
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


NEOX_WHOLE = {
    "word_embeddings.weight": vocab("gpt_neox.embed_in.weight"),
    "final_layernorm.weight": same("gpt_neox.final_layer_norm.weight"),
    "final_layernorm.bias": same("gpt_neox.final_layer_norm.bias"),
    "output_layer.weight": vocab("embed_out.weight"),
}

# Their queries, keys and values lie head after head, as ours do.
NEOX_BLOCK = {
    f"{ours}{part}": same(f"{theirs}{part}")
    for ours, theirs in (
        ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
        ("self_attention.linear_qkv.", "attention.query_key_value."),
        ("self_attention.linear_proj.", "attention.dense."),
        ("mlp.linear_fc1.layer_norm_", "post_attention_layernorm."),
        ("mlp.linear_fc1.", "mlp.dense_h_to_4h."),
        ("mlp.linear_fc2.", "mlp.dense_4h_to_h."),
    )
    for part in ("weight", "bias")
}


def read_heads(left: Config, fields: dict[str, Any]) -> None:
    """As many keys and values as queries, of equal parts of the hidden state."""
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    if hidden % heads:
        raise Unsupported("num_attention_heads", heads, f"a number that divides {hidden}")
    fields |= {"num_query_groups": heads, "kv_channels": hidden // heads}
    fields["parallel_residual"] = take_bool(left, "use_parallel_residual", True)
    left.pop("classifier_dropout", None)  # of another head


def read_neox_rope(left: Config, fields: dict[str, Any]) -> None:
    """Their older keys are rotary_pct and rotary_emb_base."""
    for old, key in (("rotary_pct", "partial_rotary_factor"), ("rotary_emb_base", "rope_theta")):
        if (value := left.pop(old, None)) is None:
            continue
        parameters = left.get("rope_parameters")
        where = parameters if isinstance(parameters, dict) else left
        if where.setdefault(key, value) != value:
            raise Unsupported(old, value, f"{where[key]}, which {key} says")
    fields |= rope.read(left, share=0.25)


def write_neox_rope(shape: GPTShape) -> Config:
    """In both ways."""
    written = rope.write(shape)
    written["rope_parameters"]["partial_rotary_factor"] = shape.rotary_percent
    theta = written.pop("rope_theta")
    return written | {"rotary_pct": shape.rotary_percent, "rotary_emb_base": theta}


ARCHITECTURES: dict[str, Architecture] = {
    "gpt_neox": Architecture(
        model_class="GPTNeoXForCausalLM",
        numbers={
            "vocab_size": "vocab_size",
            "hidden_size": "hidden_size",
            "intermediate_size": "ffn_hidden_size",
            "num_hidden_layers": "num_layers",
            "num_attention_heads": "num_attention_heads",
            "max_position_embeddings": "max_position_embeddings",
            "layer_norm_eps": "norm_epsilon",
            "initializer_range": "init_method_std",
            "hidden_dropout": "hidden_dropout",
            "attention_dropout": "attention_dropout",
        },
        defaults={
            "layer_norm_eps": 1e-5,
            "initializer_range": 0.02,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "max_position_embeddings": 2048,
        },
        switches=dict.fromkeys(("attention_probs_dropout_prob", "hidden_dropout_prob"), (None, 0)),
        implied={
            "normalization": "LayerNorm",
            "add_bias_linear": False,
            "mlp_bias": True,
            "position_embedding_type": "rope",
        },
        parts=(
            (read_heads, lambda shape: {"use_parallel_residual": shape.parallel_residual}),
            (read_neox_rope, write_neox_rope),
            bias_switches("attention_bias", defaults={"attention_bias": True}),
            activation("hidden_act", {"gelu": "gelu_exact", "gelu_new": "gelu", "gelu_fast": "gelu"}),
            tied(False),
        ),
    ),
}

TABLES: dict[str, Table] = {
    "gpt_neox": Table(
        NEOX_WHOLE,
        NEOX_BLOCK,
        prefix="gpt_neox.layers.",
        computed=re.compile(r"\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)$"),
    ),
}
