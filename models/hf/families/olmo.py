"""OLMo-2 and OLMo-3: norms behind attention and MLP, and over the queries and keys of all heads; OLMoE, of experts."""

from models.hf.block_parts import layer_windows, rotary, rotary_by_window
from models.hf.config_parts import olmoe_experts, tied
from models.hf.families.base import (
    ATTENTION,
    ATTENTION_BIAS,
    EXPERTS,
    LLAMA_DEFAULTS,
    LLAMA_HEADS,
    LLAMA_IMPLIED,
    LLAMA_NUMBERS,
    LLAMA_SWITCHES,
    LLAMA_WHOLE,
    MLP,
)
from models.hf.keys import Architecture
from models.hf.row_layouts import same
from models.hf.table import Table

_IMPLIED = LLAMA_IMPLIED | {"norm_placement": "post", "qk_layernorm": True, "qk_layernorm_full_width": True}
_DEFAULTS = LLAMA_DEFAULTS | {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048}

ARCHITECTURES: dict[str, Architecture] = {
    "olmo2": Architecture(
        model_class="Olmo2ForCausalLM",
        numbers=LLAMA_NUMBERS,
        defaults=_DEFAULTS,
        switches=LLAMA_SWITCHES,
        implied=_IMPLIED,
        parts=(LLAMA_HEADS, rotary(), tied(False), ATTENTION_BIAS),
    ),
    "olmo3": Architecture(
        model_class="Olmo3ForCausalLM",
        numbers=LLAMA_NUMBERS,
        defaults=_DEFAULTS,
        switches=LLAMA_SWITCHES,
        implied=_IMPLIED,
        parts=(
            LLAMA_HEADS,
            layer_windows(4096, pattern=4),
            rotary_by_window(500_000.0, local=500_000.0, local_key=False),
            tied(False),
            ATTENTION_BIAS,
        ),
    ),
}

ARCHITECTURES["olmoe"] = Architecture(
    model_class="OlmoeForCausalLM",
    numbers=LLAMA_NUMBERS | {"num_experts_per_tok": "moe_router_topk", "router_aux_loss_coef": "moe_aux_loss_coeff"},
    defaults=LLAMA_DEFAULTS | {"rms_norm_eps": 1e-5, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.01},
    switches=LLAMA_SWITCHES | {"clip_qkv": (None,)},
    implied=LLAMA_IMPLIED
    | {"qk_layernorm": True, "qk_layernorm_full_width": True, "moe_router_load_balancing_type": "aux_loss"},
    aliases={"num_local_experts": "num_experts"},
    parts=(LLAMA_HEADS, rotary(), tied(False), ATTENTION_BIAS, olmoe_experts(64)),
)

BLOCK = {key: rule for key, rule in (ATTENTION | MLP).items() if "layer_norm_" not in key} | {
    "self_attention.linear_proj.post_layernorm.weight": same("post_attention_layernorm.weight"),
    "mlp.linear_fc2.post_layernorm.weight": same("post_feedforward_layernorm.weight"),
}

TABLES: dict[str, Table] = {
    "olmo2": Table(LLAMA_WHOLE, BLOCK),
    "olmo3": Table(LLAMA_WHOLE, BLOCK),
    "olmoe": Table(LLAMA_WHOLE, ATTENTION | EXPERTS),
}
