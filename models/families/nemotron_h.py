"""Nemotron-H, Nemotron Nano 2 and Nemotron 3: Mamba-2 mixers, MLPs and little attention."""

import dataclasses
from typing import Any

from models.families.base import llama, tiny
from models.families.mamba import MAMBA_WHOLE, MIXER, read_mixer
from models.hf.config_parts import COUNT, heads, tied
from models.hf.keys import Architecture, Config, Unsupported, pop_number, take_list
from models.hf.row_layouts import Table, by_group, experts, same
from models.shape_fields import SPANS
from models.shapes import GPTShape
from models.spans import WIDTH


def _nemotron_h(pattern: str, hidden_size: int, ffn_hidden_size: int, heads: int, **changes: Any) -> GPTShape:
    """One letter a layer. Squared ReLU, no biases, no positions: the mixers tell the order. Heads of attention in 8
    groups, of 128 channels; Mamba heads in 8 groups.

    Source: "Nemotron-H" (arXiv:2504.03624), section 2.1 and table 1, and the config.json of each model card.
    """
    shape = dataclasses.replace(
        llama(len(pattern), hidden_size, ffn_hidden_size, heads, num_query_groups=8),
        hybrid_layer_pattern=pattern,
        kv_channels=128,
        activation="squared_relu",
        vocab_size=131072,
        position_embedding_type="none",
        max_position_embeddings=8192,
        mamba_num_heads=128,
        mamba_num_groups=8,
    )
    return dataclasses.replace(shape, **changes)


def _experts(shape: GPTShape) -> GPTShape:
    """Nemotron 3's: 128 experts of which a token meets 6, beside a shared one; balanced by a bias, as DeepSeek-V3's.

    Source: "Nemotron 3 Nano" (technical report, 2025), section 2, and the config.json of the model card.
    """
    return dataclasses.replace(
        shape,
        num_moe_experts=128,
        moe_ffn_hidden_size=1856,
        moe_shared_expert_intermediate_size=3712,
        moe_router_topk=6,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_topk_scaling_factor=2.5,
        moe_router_load_balancing_type="seq_aux_loss",
        moe_aux_loss_coeff=1e-4,
    )


def _tiny_nemotron_h(pattern: str, shape: GPTShape, **changes: Any) -> GPTShape:
    return tiny(
        shape,
        hybrid_layer_pattern=pattern,
        mamba_num_heads=8,
        mamba_head_dim=16,
        mamba_num_groups=2,
        mamba_state_dim=16,
        **changes,
    )


PUBLISHED: dict[str, GPTShape] = {
    # https://huggingface.co/nvidia/Nemotron-H-8B-Base-8K, -47B-Base-8K, -56B-Base-8K
    "nemotron_h_8b": _nemotron_h("M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", 4096, 21504, 32),
    "nemotron_h_47b": _nemotron_h(
        "M-M-M-M-M-M-M-M-M*-M-M-M-M-M-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-M-M---MM---M-M*-M-M-M-M-M-",
        8192,
        30720,
        64,
        mamba_num_heads=256,
        mamba_state_dim=256,
    ),
    "nemotron_h_56b": _nemotron_h(
        "M-M-M-M*-" + 9 * "M-M-M-M-M*-" + "M-M-M-M-M-", 8192, 32768, 64, mamba_num_heads=256, mamba_state_dim=256
    ),
    # https://huggingface.co/nvidia/NVIDIA-Nemotron-Nano-9B-v2 (arXiv:2508.14444)
    "nemotron_nano_9b_v2": _nemotron_h(
        "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        4480,
        15680,
        40,
        mamba_head_dim=80,
        max_position_embeddings=131_072,
    ),
    # https://huggingface.co/nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16
    "nemotron3_nano_30b_a3b": _experts(
        _nemotron_h(
            "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            2688,
            1856,
            32,
            num_query_groups=2,
            mamba_num_heads=64,
            max_position_embeddings=262_144,
        )
    ),
}

TINY: dict[str, GPTShape] = {
    "nemotron_h_tiny": _tiny_nemotron_h("M-*-", PUBLISHED["nemotron_h_8b"]),
    "nemotron3_tiny": _tiny_nemotron_h(
        "MEM*",
        PUBLISHED["nemotron3_nano_30b_a3b"],
        num_moe_experts=4,
        moe_ffn_hidden_size=64,
        moe_shared_expert_intermediate_size=64,
        moe_router_topk=2,
    ),
}


KINDS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-", "moe": "E"}
"""Of ``layers_block_type``: our letter."""
UNUSED = ("num_logits_to_keep", "use_mamba_kernels", "mamba_ssm_cache_dtype", "expand", "moe_shared_expert_overlap",
          "mtp_layers_block_type", "mtp_hybrid_override_pattern", "rope_theta", "partial_rotary_factor")  # fmt: skip
"""Keys that transformers' class does not read, or not while it computes logits: it has no rotary positions."""

LEAST_STEP = 1e-30
"""Of a mixer: none. transformers' class raises smaller ones to time_step_min, by default 1e-3, whatever time_step_limit
says; the models' own code and megatron-core do not. Not 0: it takes the logarithm where it draws new weights."""

ATTENTION = {
    "self_attention.linear_qkv.layer_norm_weight": same("norm.weight"),
    "self_attention.linear_qkv.weight": by_group(*(f"mixer.{kind}_proj.weight" for kind in "qkv")),
    "self_attention.linear_proj.weight": same("mixer.o_proj.weight"),
}
MLP = {
    "mlp.linear_fc1.layer_norm_weight": same("norm.weight"),
    "mlp.linear_fc1.weight": same("mixer.up_proj.weight"),
    "mlp.linear_fc2.weight": same("mixer.down_proj.weight"),
}
EXPERTS = {
    "pre_mlp_layernorm.weight": same("norm.weight"),
    "mlp.router.weight": same("mixer.gate.weight"),
    "mlp.router.expert_bias": same("mixer.gate.e_score_correction_bias"),
    "mlp.experts.linear_fc1.weight": experts("mixer.experts.{expert}.up_proj.weight"),
    "mlp.experts.linear_fc2.weight": experts("mixer.experts.{expert}.down_proj.weight"),
    "mlp.shared_experts.linear_fc1.weight": same("mixer.shared_experts.up_proj.weight"),
    "mlp.shared_experts.linear_fc2.weight": same("mixer.shared_experts.down_proj.weight"),
}


def read_pattern(left: Config, fields: dict[str, Any]) -> None:
    """One letter a layer, or one word; files on the hub have letters, and the number of layers beside them."""
    pattern, words = left.pop("hybrid_override_pattern", None), take_list(left, "layers_block_type")
    if words and any(not isinstance(word, str) or word not in KINDS for word in words):
        raise Unsupported("layers_block_type", words, f"a list of {', '.join(KINDS)}")
    if pattern is None:
        pattern = "".join(KINDS[word] for word in words)
    if not isinstance(pattern, str) or not pattern or set(pattern) - set(KINDS.values()):
        raise Unsupported("hybrid_override_pattern", pattern, f"letters {', '.join(sorted(set(KINDS.values())))}")
    layers = pop_number(left, "num_hidden_layers", len(pattern), SPANS["num_layers"])
    if layers != len(pattern):
        raise Unsupported("num_hidden_layers", layers, f"{len(pattern)}, one for each letter of the pattern")
    fields |= {"hybrid_layer_pattern": pattern, "num_layers": layers}


def read_attention(left: Config, fields: dict[str, Any]) -> None:
    """Heads; older files call their width attention_head_dim."""
    older = left.pop("attention_head_dim", None)
    if older is not None:
        left.setdefault("head_dim", older)
    left.setdefault("head_dim", 128)
    left.setdefault("num_key_value_heads", 8)
    _HEADS[0](left, fields)
    epsilon = left.pop("rms_norm_eps", None)  # of older files, beside the other
    if epsilon is not None and epsilon != fields["norm_epsilon"]:
        raise Unsupported("rms_norm_eps", epsilon, f"{fields['norm_epsilon']}, as layer_norm_epsilon")
    for key in UNUSED:
        left.pop(key, None)


def read_experts(left: Config, fields: dict[str, Any]) -> None:
    """DeepSeek-V3's router over experts without a gate; keys of models without experts have no meaning."""
    found = {
        "num_moe_experts": pop_number(left, "n_routed_experts", 8, SPANS["num_moe_experts"]),
        "moe_ffn_hidden_size": pop_number(left, "moe_intermediate_size", 7688, WIDTH),
        "moe_shared_expert_intermediate_size": pop_number(left, "moe_shared_expert_intermediate_size", 7688, WIDTH),
        "moe_router_topk": pop_number(left, "num_experts_per_tok", 2, SPANS["moe_router_topk"]),
        "moe_router_topk_scaling_factor": left.pop("routed_scaling_factor", 1.0),
    }
    shared = pop_number(left, "n_shared_experts", 1, COUNT)
    groups, chosen = pop_number(left, "n_group", 1, COUNT), pop_number(left, "topk_group", 1, COUNT)
    normed, latent = left.pop("norm_topk_prob", True), left.pop("moe_latent_size", None)
    if "E" not in fields["hybrid_layer_pattern"]:
        return
    for key, value, only in (("n_shared_experts", shared, 1), ("norm_topk_prob", normed, True),
                             ("moe_latent_size", latent, None)):  # fmt: skip
        if value != only:
            raise Unsupported(key, value, repr(only))
    factor = found["moe_router_topk_scaling_factor"]
    if problem := SPANS["moe_router_topk_scaling_factor"].problem("routed_scaling_factor", factor):
        raise Unsupported("routed_scaling_factor", factor, problem)
    if found["moe_router_topk"] == 1:
        what = "2 or more: transformers weighs a single expert by 1, megatron-core by its score"
        raise Unsupported("num_experts_per_tok", 1, what)
    if groups != chosen:
        if found["moe_router_topk"] != 2 * chosen:
            raise Unsupported("topk_group", chosen, "half of num_experts_per_tok, or n_group")
        found |= {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}
    fields |= found | {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 1e-4,  # no key of theirs
    }


def write_experts(shape: GPTShape) -> Config:
    """As ``read_experts``."""
    if not shape.num_moe_experts:
        return {}
    return {
        "n_routed_experts": shape.num_moe_experts,
        "n_shared_experts": 1,
        "moe_intermediate_size": shape.expert_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": shape.moe_shared_expert_intermediate_size,
        "num_experts_per_tok": shape.moe_router_topk,
        "routed_scaling_factor": shape.moe_router_topk_scaling_factor,
        "n_group": shape.moe_router_num_groups or 1,
        "topk_group": shape.moe_router_group_topk or 1,
        "norm_topk_prob": True,
    }


_HEADS = heads(())

ARCHITECTURES: dict[str, Architecture] = {
    "nemotron_h": Architecture(
        model_class="NemotronHForCausalLM",
        numbers={
            "vocab_size": "vocab_size",
            "hidden_size": "hidden_size",
            "intermediate_size": "ffn_hidden_size",
            "num_attention_heads": "num_attention_heads",
            "max_position_embeddings": "max_position_embeddings",
            "layer_norm_epsilon": "norm_epsilon",
            "initializer_range": "init_method_std",
            "attention_dropout": "attention_dropout",
            "hidden_dropout": "hidden_dropout",
            "ssm_state_size": "mamba_state_dim",
            "mamba_num_heads": "mamba_num_heads",
            "mamba_head_dim": "mamba_head_dim",
            "n_groups": "mamba_num_groups",
        },
        defaults={
            "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 21504, "num_attention_heads": 32,
            "max_position_embeddings": 4096, "layer_norm_epsilon": 1e-5, "initializer_range": 0.02,
            "attention_dropout": 0.0, "hidden_dropout": 0.0, "ssm_state_size": 128, "mamba_num_heads": 128,
            "mamba_head_dim": 64, "n_groups": 8,
        },
        switches={
            "mlp_hidden_act": ("relu2",), "mamba_hidden_act": ("silu",), "conv_kernel": (4,), "use_conv_bias": (True,),
            "use_bias": (False,), "mamba_proj_bias": (False,), "mlp_bias": (False,), "attention_bias": (False,),
            "sliding_window": (None,), "num_nextn_predict_layers": (0,),
        },
        implied={
            "normalization": "RMSNorm",
            "activation": "squared_relu",
            "add_bias_linear": False,
            "position_embedding_type": "none",
        },
        aliases={"layer_types": "layers_block_type", "num_local_experts": "n_routed_experts"},
        parts=(
            (read_pattern, lambda shape: {
                "hybrid_override_pattern": shape.hybrid_layer_pattern, "num_hidden_layers": shape.num_layers}),
            (read_mixer, lambda shape: {"mamba_num_heads": shape.mamba_heads, "time_step_min": LEAST_STEP}),
            (read_attention, _HEADS[1]),
            (read_experts, write_experts),
            tied(False),
        ),
    ),
}  # fmt: skip

TABLES: dict[str, Table] = {
    "nemotron_h": Table(MAMBA_WHOLE, MIXER | ATTENTION | MLP | EXPERTS, prefix="backbone.layers.", bare="backbone."),
}
