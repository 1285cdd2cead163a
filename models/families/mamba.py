"""Mamba-2: state space models without attention or MLP. state-spaces' own folders have another config.json."""

import dataclasses
from typing import Any

from models.families.base import llama, tiny
from models.hf.config_parts import tied
from models.hf.keys import Architecture, Config, Unsupported, pop_number
from models.hf.row_layouts import Table, same, unsqueezed
from models.hf.row_layouts import vocabulary as vocab
from models.shapes import GPTShape
from models.spans import HEADS


def _mamba2(num_layers: int, hidden_size: int) -> GPTShape:
    """state-spaces' models: mixers alone, of heads of 64 channels with states of 128, all heads in one group.

    One group cannot be split, so TP has to be 1: megatron-core gives each TP rank groups of its own. The tables are of
    GPT-NeoX's tokenizer, rounded up to a multiple of 16. Source: "Transformers are SSMs" (arXiv:2405.21060), appendix
    D.2 and table 9, and each config.json of https://huggingface.co/state-spaces (d_model, n_layer).
    """
    heads = 2 * hidden_size // 64
    return dataclasses.replace(
        llama(num_layers, hidden_size, 4 * hidden_size, heads, heads),
        kv_channels=64,
        hybrid_layer_pattern="M" * num_layers,
        mamba_num_heads=heads,
        mamba_num_groups=1,
        vocab_size=50288,
        position_embedding_type="none",
        max_position_embeddings=2048,
        untie_embeddings_and_output_weights=False,
    )


PUBLISHED: dict[str, GPTShape] = {
    # https://huggingface.co/state-spaces/mamba2-130m, -370m, -780m, -1.3b, -2.7b
    "mamba2_130m": _mamba2(24, 768),
    "mamba2_370m": _mamba2(48, 1024),
    "mamba2_780m": _mamba2(48, 1536),
    "mamba2_1_3b": _mamba2(48, 2048),
    "mamba2_2_7b": _mamba2(64, 2560),
    # https://huggingface.co/mistralai/Mamba-Codestral-7B-v0.1
    "mamba_codestral_7b": dataclasses.replace(
        _mamba2(64, 4096), mamba_num_groups=8, vocab_size=32768, untie_embeddings_and_output_weights=True
    ),
}

TINY: dict[str, GPTShape] = {
    "mamba2_tiny": tiny(
        PUBLISHED["mamba_codestral_7b"],
        num_query_groups=4,
        hybrid_layer_pattern="MMMM",
        mamba_num_heads=8,
        mamba_head_dim=16,
        mamba_num_groups=2,
        mamba_state_dim=16,
    ),
}


NORM_EPSILON = 1e-5
"""Of the gated norm in megatron-core, whatever the others' is; transformers has one number for all."""

MAMBA_WHOLE = {
    "word_embeddings.weight": vocab("backbone.embeddings.weight"),
    "final_layernorm.weight": same("backbone.norm_f.weight"),
    "output_layer.weight": vocab("lm_head.weight"),
}

# Rows of in_proj and of the convolution lie in the same order here and there.
MIXER = {
    "mixer.in_proj.layer_norm_weight": same("norm.weight"),
    "mixer.conv1d.weight": unsqueezed("mixer.conv1d.weight", 1),
    **{f"mixer.{name}": same(f"mixer.{name}") for name in (
        "in_proj.weight", "conv1d.bias", "dt_bias", "A_log", "D", "norm.weight", "out_proj.weight")},
}  # fmt: skip

STEPS = {
    "time_step_min", "time_step_max", "time_step_floor", "time_step_rank", "time_step_init_scheme", "time_step_scale",
    "rescale_prenorm_residual",
}  # fmt: skip
"""How dt_bias begins, and out_proj."""
NUMERICS = {"chunk_size", "residual_in_fp32"}
"""How it is computed; the model is the same. Triplane adds to the residual stream in the weights' type."""


def read_mixer(left: Config, fields: dict[str, Any]) -> None:
    """What Mamba-2's and Nemotron-H's mixers have alike."""
    if fields["norm_epsilon"] != NORM_EPSILON:
        what = "transformers norms a mixer's output with that, megatron-core with 1e-05 whatever it is"
        raise Unsupported("layer_norm_epsilon", fields["norm_epsilon"], f"{NORM_EPSILON}: {what}")
    for key in STEPS | NUMERICS:
        left.pop(key, None)
    limit = left.pop("time_step_limit", None)
    if limit is not None and not _is_unlimited(limit):
        raise Unsupported("time_step_limit", limit, "[0, inf]: steps are not clipped")


def _is_unlimited(limit: object) -> bool:
    """JSON has no infinity: transformers writes it as an object, or as Python does."""
    if not isinstance(limit, list | tuple) or len(limit) != 2 or limit[0] != 0:
        return False
    return limit[1] in (float("inf"), "Infinity", {"__float__": "Infinity"})


def read_mamba2(left: Config, fields: dict[str, Any]) -> None:
    """One mixer a layer, and nothing else; ``expand`` says again how many channels the heads make."""
    layers, heads, width = fields["num_layers"], fields["mamba_num_heads"], fields["mamba_head_dim"]
    if heads * width != pop_number(left, "expand", 2, HEADS) * fields["hidden_size"]:
        raise Unsupported("num_heads", heads, f"expand x hidden_size / head_dim {width}")
    fields |= {"hybrid_layer_pattern": "M" * layers, "ffn_hidden_size": 4 * fields["hidden_size"]}
    fields |= {"num_attention_heads": heads, "num_query_groups": heads, "kv_channels": width}


def write_mamba2(shape: GPTShape) -> Config:
    """As ``read_mamba2``. A width that no whole ``expand`` makes is refused as it is read back."""
    inner = shape.mamba_heads * shape.mamba_head_dim
    return {"expand": inner // shape.hidden_size, "num_heads": shape.mamba_heads}


ARCHITECTURES: dict[str, Architecture] = {
    "mamba2": Architecture(
        model_class="Mamba2ForCausalLM",
        numbers={
            "vocab_size": "vocab_size",
            "hidden_size": "hidden_size",
            "num_hidden_layers": "num_layers",
            "layer_norm_epsilon": "norm_epsilon",
            "initializer_range": "init_method_std",
            "state_size": "mamba_state_dim",
            "num_heads": "mamba_num_heads",
            "head_dim": "mamba_head_dim",
            "n_groups": "mamba_num_groups",
        },
        defaults={
            "layer_norm_epsilon": 1e-5, "initializer_range": 0.1, "state_size": 128, "num_heads": 128, "head_dim": 64,
            "n_groups": 8, "hidden_size": 4096, "num_hidden_layers": 64, "vocab_size": 32768,
        },
        switches={"conv_kernel": (4,), "use_bias": (False,), "use_conv_bias": (True,), "hidden_act": ("silu",)}
        | dict.fromkeys(("norm_before_gate", "rms_norm"), (None, True)),  # published, and not read by transformers
        implied={
            "normalization": "RMSNorm",
            "activation": "swiglu",
            "add_bias_linear": False,
            "position_embedding_type": "none",
            "max_position_embeddings": 2048,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        },
        parts=((read_mixer, lambda _: {}), (read_mamba2, write_mamba2), tied(False)),
    ),
}  # fmt: skip

TABLES: dict[str, Table] = {"mamba2": Table(MAMBA_WHOLE, MIXER, prefix="backbone.layers.", bare="backbone.")}
