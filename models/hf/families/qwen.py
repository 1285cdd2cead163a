"""Qwen2 and Qwen3, dense and of experts."""

from models.hf.block_parts import no_windows
from models.hf.config_parts import qwen_moe, tied
from models.hf.families.base import (
    ATTENTION,
    ATTENTION_BIAS,
    EXPERTS,
    GATED_SHARED_EXPERT,
    HEADS,
    LLAMA,
    LLAMA_DEFAULTS,
    LLAMA_IMPLIED,
    LLAMA_NUMBERS,
    LLAMA_SWITCHES,
    LLAMA_WHOLE,
    MLP,
    ROPE,
    SWITCHED_WINDOWS,
    WIDE_HEADS,
    WINDOWS_EVERYWHERE,
)
from models.hf.keys import Architecture
from models.hf.table import Table

ARCHITECTURES: dict[str, Architecture] = {
    "qwen2": Architecture(
        model_class="Qwen2ForCausalLM",
        numbers=LLAMA_NUMBERS,
        defaults=LLAMA_DEFAULTS,
        switches=LLAMA_SWITCHES | {"use_mrope": (None, False)},
        implied=LLAMA_IMPLIED | {"add_qkv_bias": True},
        parts=(HEADS, ROPE, tied(False), SWITCHED_WINDOWS),
    ),
    "qwen2_moe": Architecture(
        model_class="Qwen2MoeForCausalLM",
        numbers=LLAMA_NUMBERS
        | {
            "moe_intermediate_size": "moe_ffn_hidden_size",
            "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
            "num_experts_per_tok": "moe_router_topk",
            "router_aux_loss_coef": "moe_aux_loss_coeff",
        },
        defaults=LLAMA_DEFAULTS
        | {
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts_per_tok": 4,
            "router_aux_loss_coef": 0.001,
        },
        switches=LLAMA_SWITCHES | {"qkv_bias": (True,)},
        implied=LLAMA_IMPLIED
        | {"add_qkv_bias": True, "moe_shared_expert_gate": True, "moe_router_load_balancing_type": "aux_loss"},
        parts=(HEADS, ROPE, tied(False), no_windows(), qwen_moe(60)),
    ),
    "qwen3": Architecture(
        model_class="Qwen3ForCausalLM",
        numbers=LLAMA_NUMBERS,
        defaults=LLAMA_DEFAULTS,
        switches=LLAMA_SWITCHES,
        implied=LLAMA_IMPLIED | {"qk_layernorm": True},
        parts=(WIDE_HEADS, ROPE, tied(False), SWITCHED_WINDOWS, ATTENTION_BIAS),
    ),
    "qwen3_moe": Architecture(
        model_class="Qwen3MoeForCausalLM",
        numbers=LLAMA_NUMBERS
        | {
            "moe_intermediate_size": "moe_ffn_hidden_size",
            "num_experts_per_tok": "moe_router_topk",
            "router_aux_loss_coef": "moe_aux_loss_coeff",
        },
        defaults=LLAMA_DEFAULTS
        | {"moe_intermediate_size": 768, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.001},
        switches=LLAMA_SWITCHES,
        implied=LLAMA_IMPLIED | {"qk_layernorm": True, "moe_router_load_balancing_type": "global_aux_loss"},
        aliases={"num_experts": "num_local_experts"},
        parts=(WIDE_HEADS, ROPE, tied(False), WINDOWS_EVERYWHERE, ATTENTION_BIAS, qwen_moe(128)),
    ),
}

TABLES: dict[str, Table] = {
    "qwen2": LLAMA,
    "qwen2_moe": Table(LLAMA_WHOLE, ATTENTION | MLP | EXPERTS | GATED_SHARED_EXPERT),
    "qwen3": LLAMA,
    "qwen3_moe": Table(LLAMA_WHOLE, ATTENTION | MLP | EXPERTS),
}
