"""ERNIE-4.5, of experts."""

import dataclasses
from typing import Any

from models.families.base import ATTENTION, EXPERTS, HEADS, LLAMA_WHOLE, MLP, like_llama, llama, tiny
from models.hf.block_parts import rotary
from models.hf.config_parts import COUNT, TOKENS, freq, tied
from models.hf.keys import Architecture, Config, Unsupported, pop_number
from models.hf.row_layouts import Table, unsqueezed
from models.shapes import GPTShape
from models.spans import Span

PUBLISHED: dict[str, GPTShape] = {
    # https://huggingface.co/baidu/ERNIE-4.5-21B-A3B-Base-PT; "ERNIE 4.5 Technical Report", section 2: experts chosen by
    # the sum of softmax and a bias, weights that sum to 1; neighbouring channels turned together.
    "ernie45_21b_a3b": dataclasses.replace(
        llama(28, 2560, 12288, num_attention_heads=20, num_query_groups=4),
        vocab_size=103_424,
        rotary_base=500_000,
        rotary_interleaved=True,
        max_position_embeddings=131_072,
        untie_embeddings_and_output_weights=False,
        num_moe_experts=64,
        moe_layer_freq="[0]*1+[1]*27",
        moe_ffn_hidden_size=1536,
        moe_shared_expert_intermediate_size=2 * 1536,
        moe_router_topk=6,
        moe_router_enable_expert_bias=True,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1e-3,
    ),
}

TINY: dict[str, GPTShape] = {
    "ernie45_moe_tiny": tiny(
        PUBLISHED["ernie45_21b_a3b"],
        num_moe_experts=6,
        moe_layer_freq="[0]*1+[1]*3",
        moe_router_topk=3,
        moe_ffn_hidden_size=40,
        moe_shared_expert_intermediate_size=80,
    ),
}


def _read(left: Config, fields: dict[str, Any]) -> None:
    """Which blocks have experts, and how many of them all tokens meet."""
    blocks = fields["num_layers"]
    first, step = pop_number(left, "moe_layer_start_index", 1, COUNT), pop_number(left, "moe_layer_interval", 1, TOKENS)
    last = pop_number(left, "moe_layer_end_index", -1, Span(-1, blocks, whole=True))
    last = blocks - 1 if last == -1 else last
    moe = [first <= block <= last and (block + 1) % step == 0 for block in range(blocks)]
    if not any(moe):
        raise Unsupported("moe_layer_start_index", first, f"a block of {blocks}: one has to have experts")
    fields["moe_layer_freq"] = freq(moe)
    shared = pop_number(left, "moe_num_shared_experts", 2, COUNT)
    fields["moe_shared_expert_intermediate_size"] = shared * fields["moe_ffn_hidden_size"]
    left.pop("moe_norm_min", None)  # weights of chosen experts sum to more than any
    left.pop("moe_capacity", None)  # of their training


def _write(shape: GPTShape) -> Config:
    """As ``_read``."""
    moe = shape.moe_blocks
    last = len(moe) - 1 - moe[::-1].index(True) if True in moe else -1
    return {
        "moe_intermediate_size": shape.expert_ffn_hidden_size,
        "moe_num_shared_experts": shape.moe_shared_expert_intermediate_size // shape.expert_ffn_hidden_size,
        "moe_layer_start_index": moe.index(True) if True in moe else 0,
        "moe_layer_end_index": last,
        "moe_layer_interval": 1,
    }


ARCHITECTURES: dict[str, Architecture] = {
    "ernie4_5_moe": like_llama(
        "Ernie4_5_MoeForCausalLM",
        without=("attention_dropout",),
        numbers={
            "moe_num_experts": "num_moe_experts",
            "moe_intermediate_size": "moe_ffn_hidden_size",
            "moe_k": "moe_router_topk",
            "router_aux_loss_coef": "moe_aux_loss_coeff",
        },
        defaults={
            "rms_norm_eps": 1e-5,
            "moe_num_experts": 64,
            "moe_intermediate_size": 1536,
            "moe_k": 6,
            "router_aux_loss_coef": 0.001,
        },
        switches={"use_bias": (False,), "moe_gate": ("topk",), "moe_use_aux_free": (True,), "use_rmsnorm": (True,)},
        implied={
            "attention_dropout": 0.0,
            "rotary_interleaved": True,
            "moe_router_enable_expert_bias": True,
            "moe_router_load_balancing_type": "aux_loss",
        },
        aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
        parts=(HEADS, rotary(theta=500_000.0), tied(True), (_read, _write)),
    ),
}

TABLES: dict[str, Table] = {
    "ernie4_5_moe": Table(
        LLAMA_WHOLE,
        ATTENTION
        | MLP
        | EXPERTS
        | {"mlp.router.expert_bias": unsqueezed("mlp.moe_statics.e_score_correction_bias", 0)},
    ),
}
