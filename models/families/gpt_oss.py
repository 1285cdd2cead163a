"""gpt-oss."""

import dataclasses
from typing import Any

from models.families.base import ATTENTION, LLAMA_WHOLE, LOCAL_EXPERT_NUMBERS, WIDE_HEADS, like_llama, llama, tiny
from models.hf import rope
from models.hf.block_parts import layer_windows
from models.hf.config_parts import rope_unless_given, tied
from models.hf.keys import Architecture, Config, Unsupported, is_one_of
from models.hf.row_layouts import Table, fused_expert_biases, fused_experts, same
from models.shapes import GPTShape


def _gpt_oss(num_layers: int, num_moe_experts: int) -> GPTShape:
    """Biases everywhere, a learned logit in each head's softmax, every other block windowed, a clamped SwiGLU.

    Source: "gpt-oss-120b & gpt-oss-20b Model Card" (arXiv:2508.10925), section 2, https://github.com/openai/gpt-oss,
    and the config.json of each model card. Its router_aux_loss_coef of 0.9 is no one's who trained it: 0.001 is that
    of transformers' class.
    """
    return dataclasses.replace(
        llama(num_layers, 2880, 2880, num_attention_heads=64, num_query_groups=8),
        kv_channels=64,
        vocab_size=201_088,
        activation="quick_geglu",
        activation_func_clamp_value=7.0,
        glu_linear_offset=1.0,
        add_bias_linear=True,
        softmax_type="learnable",
        rotary_base=150_000,
        rope_scaling="yarn",
        rope_scaling_factor=32.0,
        rope_original_max_position_embeddings=4096,
        yarn_correction_range_round_to_int=False,
        max_position_embeddings=131_072,
        window_size=(127, 0),
        window_attn_skip_freq="2",
        num_moe_experts=num_moe_experts,
        moe_ffn_hidden_size=2880,
        moe_router_topk=4,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1e-3,
    )


def _tiny_gpt_oss() -> GPTShape:
    """Windows and an original context that a short sequence exceeds; an awkward width of experts."""
    small: dict[str, Any] = {
        "window_size": (15, 0),
        "rope_original_max_position_embeddings": 32,
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 48,
    }
    return tiny(PUBLISHED["gpt_oss_20b"], **small)


PUBLISHED: dict[str, GPTShape] = {
    # https://huggingface.co/openai/gpt-oss-20b and gpt-oss-120b
    "gpt_oss_20b": _gpt_oss(24, 32),
    "gpt_oss_120b": _gpt_oss(36, 128),
}

TINY: dict[str, GPTShape] = {
    "gpt_oss_tiny": _tiny_gpt_oss(),
}


_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""What transformers' class has where the file has nothing."""


def _read(left: Config, fields: dict[str, Any]) -> None:
    """Experts, positions that are left out, and copies of other numbers."""
    fields["moe_ffn_hidden_size"] = fields["ffn_hidden_size"]
    left.pop("initial_context_length", None)  # original_max_position_embeddings says it
    topk = fields["moe_router_topk"]
    if not is_one_of(found := left.pop("experts_per_token", topk), (topk, None)):
        raise Unsupported("experts_per_token", found, f"{topk}, which num_experts_per_tok says")


def _write(shape: GPTShape) -> Config:
    """As ``_read``."""
    return {"intermediate_size": shape.expert_ffn_hidden_size}


def _read_quantization(left: Config, fields: dict[str, Any]) -> None:
    """The files on the hub have experts in MXFP4, which transformers turns into 16 bits."""
    if (found := left.pop("quantization_config", None)) is not None:
        command = (
            "from transformers import AutoModelForCausalLM, Mxfp4Config; AutoModelForCausalLM.from_pretrained("
            "'HF_FOLDER', dtype='bfloat16', quantization_config=Mxfp4Config(dequantize=True))"
            ".save_pretrained('BF16_FOLDER')"
        )
        raise Unsupported("quantization_config", found, f'none. Dequantise it first: python -c "{command}"')


ARCHITECTURES: dict[str, Architecture] = {
    "gpt_oss": like_llama(
        "GptOssForCausalLM",
        numbers=LOCAL_EXPERT_NUMBERS | {"swiglu_limit": "activation_func_clamp_value"},
        defaults={"rms_norm_eps": 1e-5, "num_experts_per_tok": 4, "router_aux_loss_coef": 0.001, "swiglu_limit": 7.0},
        switches={"attention_bias": (True,), "swiglu_alpha": (1.702,)},
        implied={
            "activation": "quick_geglu",
            "glu_linear_offset": 1.0,
            "add_bias_linear": True,
            "softmax_type": "learnable",
            "moe_router_load_balancing_type": "aux_loss",
        },
        aliases={"num_experts": "num_local_experts"},
        parts=(
            WIDE_HEADS,
            (_read, _write),
            (rope_unless_given(_ROPE), rope.write),
            layer_windows(128, pattern=2),
            tied(False),
            (_read_quantization, lambda _: {}),
        ),
    ),
}

TABLES: dict[str, Table] = {
    "gpt_oss": Table(
        LLAMA_WHOLE,
        ATTENTION
        | {
            "self_attention.core_attention.softmax_offset": same("self_attn.sinks"),
            "pre_mlp_layernorm.weight": same("post_attention_layernorm.weight"),
            "mlp.router.weight": same("mlp.router.weight"),
            "mlp.router.bias": same("mlp.router.bias"),
            "mlp.experts.linear_fc1.weight": fused_experts("mlp.experts.gate_up_proj", parts=2, interleaved=True),
            "mlp.experts.linear_fc1.bias": fused_expert_biases(
                "mlp.experts.gate_up_proj_bias", parts=2, interleaved=True
            ),
            "mlp.experts.linear_fc2.weight": fused_experts("mlp.experts.down_proj"),
            "mlp.experts.linear_fc2.bias": fused_expert_biases("mlp.experts.down_proj_bias"),
        },
    ),
}
