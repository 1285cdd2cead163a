"""Mistral, Mixtral and Ministral."""

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
from models.hf.keys import Architecture
from models.hf.row_layouts import experts, same
from models.hf.table import Table

MIXTRAL_EXPERTS = {
    "pre_mlp_layernorm.weight": same("post_attention_layernorm.weight"),
    "mlp.router.weight": same("block_sparse_moe.gate.weight"),
    "mlp.experts.linear_fc1.weight": experts(
        "block_sparse_moe.experts.{expert}.w1.weight", "block_sparse_moe.experts.{expert}.w3.weight"
    ),
    "mlp.experts.linear_fc2.weight": experts("block_sparse_moe.experts.{expert}.w2.weight"),
}


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
        parts=(HEADS, ROPE, tied(False), window(None), (read_mixtral, write_mixtral)),
    ),
}

TABLES: dict[str, Table] = {
    "mistral": LLAMA,
    "ministral": LLAMA,
    "mixtral": Table(LLAMA_WHOLE, ATTENTION | MIXTRAL_EXPERTS),
}
