"""Phi-3, Phi-3.5 and Phi-4, whose queries, keys and values are one tensor, and whose gate and up projection."""

from models.hf.block_parts import equal_dropouts
from models.hf.config_parts import tied, window
from models.hf.families.base import (
    ATTENTION,
    LLAMA_DEFAULTS,
    LLAMA_HEADS,
    LLAMA_IMPLIED,
    LLAMA_NUMBERS,
    LLAMA_SWITCHES,
    LLAMA_WHOLE,
    MLP,
)
from models.hf.keys import Architecture
from models.hf.phi_rope import read_phi_rope, write_phi_rope
from models.hf.row_layouts import fused_by_group, same
from models.hf.table import Table

_IMPLIED = {key: ours for key, ours in LLAMA_IMPLIED.items() if key != "hidden_dropout"}

ARCHITECTURES: dict[str, Architecture] = {
    "phi3": Architecture(
        model_class="Phi3ForCausalLM",
        numbers=LLAMA_NUMBERS,
        defaults=LLAMA_DEFAULTS | {"rms_norm_eps": 1e-5},
        switches=LLAMA_SWITCHES
        | {"attention_bias": (False,), "mlp_bias": (None, False), "lm_head_bias": (None, False)}
        | {"full_attn_mod": (None, 1), "interpolate_factor": (None, 1)},
        implied=_IMPLIED,
        parts=(
            LLAMA_HEADS,
            (read_phi_rope, write_phi_rope),
            tied(False),
            window(None),
            equal_dropouts("resid_pdrop", ("embd_pdrop",), 0.0),
        ),
    ),
}

FUSED = {
    "self_attention.linear_qkv.weight": fused_by_group("self_attn.qkv_proj.weight"),
    "mlp.linear_fc1.weight": same("mlp.gate_up_proj.weight"),
}

TABLES: dict[str, Table] = {"phi3": Table(LLAMA_WHOLE, ATTENTION | MLP | FUSED)}
