"""Mistral, Mixtral, Ministral and Ministral 3."""

from typing import Any

from models.hf import rope
from models.hf.block_parts import layer_windows
from models.hf.config_parts import read_mixtral, tied, window, write_mixtral
from models.hf.families.base import (
    ATTENTION,
    HEADS,
    LLAMA,
    LLAMA_DEFAULTS,
    LLAMA_IMPLIED,
    LLAMA_NUMBERS,
    LLAMA_SWITCHES,
    LLAMA_WHOLE,
    ROPE,
)
from models.hf.keys import Architecture, Config, Span, Unsupported
from models.hf.row_layouts import experts, same
from models.hf.table import Table
from models.shapes import GPTShape

MIXTRAL_EXPERTS = {
    "pre_mlp_layernorm.weight": same("post_attention_layernorm.weight"),
    "mlp.router.weight": same("block_sparse_moe.gate.weight"),
    "mlp.experts.linear_fc1.weight": experts(
        "block_sparse_moe.experts.{expert}.w1.weight", "block_sparse_moe.experts.{expert}.w3.weight"
    ),
    "mlp.experts.linear_fc2.weight": experts("block_sparse_moe.experts.{expert}.w2.weight"),
}

BETA = "llama_4_scaling_beta"
_UNTOLD: Config = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    BETA: 0.1,
}
"""Ministral 3's RoPE where a file has none."""


def _read_growing(left: Config, fields: dict[str, Any]) -> None:
    """RoPE, and queries that grow with their position, beyond the context that YaRN stretches."""
    keys = [key for key in ("rope_parameters", "rope_scaling") if left.get(key) is not None]
    if not keys:
        left["rope_parameters"], keys = _UNTOLD, ["rope_parameters"]
    betas = [_take_beta(left, key) for key in keys]
    if betas[0] != betas[-1]:
        raise Unsupported(f"rope_scaling.{BETA}", betas[-1], f"{betas[0]}, which rope_parameters says")
    with rope.errors():
        fields |= rope.read(left)
    if fields["rope_scaling"] != "yarn":
        raise Unsupported(f"{keys[0]}.rope_type", fields["rope_scaling"], "'yarn', as published models have it")
    if betas[0]:
        fields |= {"attn_scale": betas[0], "attn_scale_all_blocks": True}
        fields["floor_scale"] = fields["rope_original_max_position_embeddings"]


def _take_beta(left: Config, key: str) -> float:
    """Leaves YaRN's own parameters; 0.0 where there are no parameters at all, which ``rope.read`` refuses."""
    if not isinstance(left[key], dict):
        return 0.0
    values = left[key] = {**left[key]}
    values.pop("max_position_embeddings", None)  # transformers reads the one beside the parameters
    beta = values.pop(BETA, None)
    if Span(0, 1e6).problem(BETA, beta):
        raise Unsupported(f"{key}.{BETA}", beta, "a number from 0")
    return float(beta)


def _write_growing(shape: GPTShape) -> Config:
    """As ``_read_growing``. transformers prefers rope_scaling where there is one."""
    written = rope.write(shape)
    parameters = written["rope_parameters"] | {BETA: shape.attn_scale}
    return written | {"rope_parameters": parameters, "rope_scaling": None}


ARCHITECTURES: dict[str, Architecture] = {
    "mistral": Architecture(
        model_class="MistralForCausalLM",
        numbers=LLAMA_NUMBERS,
        defaults=LLAMA_DEFAULTS,
        switches=LLAMA_SWITCHES,
        implied=LLAMA_IMPLIED,
        parts=(HEADS, ROPE, tied(False), window(4096)),
    ),
    "ministral": Architecture(
        model_class="MinistralForCausalLM",
        numbers=LLAMA_NUMBERS,
        defaults=LLAMA_DEFAULTS,
        switches=LLAMA_SWITCHES,
        implied=LLAMA_IMPLIED,
        parts=(HEADS, ROPE, tied(False), layer_windows(4096)),
    ),
    "ministral3": Architecture(
        model_class="Ministral3ForCausalLM",
        numbers=LLAMA_NUMBERS,
        defaults=LLAMA_DEFAULTS | {"rms_norm_eps": 1e-5},
        switches=LLAMA_SWITCHES,
        implied=LLAMA_IMPLIED,
        parts=(HEADS, (_read_growing, _write_growing), tied(False), window(None)),
    ),
    "mixtral": Architecture(
        model_class="MixtralForCausalLM",
        numbers=LLAMA_NUMBERS
        | {
            "num_local_experts": "num_moe_experts",
            "num_experts_per_tok": "moe_router_topk",
            "router_aux_loss_coef": "moe_aux_loss_coeff",
        },
        defaults=LLAMA_DEFAULTS
        | {"rms_norm_eps": 1e-5, "num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001},
        switches=LLAMA_SWITCHES | {"router_jitter_noise": (0.0,)},
        implied=LLAMA_IMPLIED | {"moe_router_load_balancing_type": "aux_loss"},
        aliases={"num_experts": "num_local_experts"},
        parts=(HEADS, ROPE, tied(False), window(None), (read_mixtral, write_mixtral)),
    ),
}

TABLES: dict[str, Table] = {
    "mistral": LLAMA,
    "ministral": LLAMA,
    "ministral3": LLAMA,
    "mixtral": Table(LLAMA_WHOLE, ATTENTION | MIXTRAL_EXPERTS),
}
