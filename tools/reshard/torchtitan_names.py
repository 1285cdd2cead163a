"""torchtitan's names and rows, made of transformers'.

Its Llama rotates neighbouring channels of a head where transformers rotates halves: rows of its queries and keys lie
otherwise (torchtitan/models/llama3/state_dict_adapter.py).
"""

import dataclasses
import re

from models.shapes import GPTShape
from tools.reshard.module_names import EXPERT
from tools.reshard.named_weights import Naming, NewName, RowRun

ROTATES_NEIGHBOURS = {"llama": True, "qwen3": False, "qwen3_moe": False, "deepseek_v3": False, "mixtral": True}
"""torchtitan's models by the model_type of transformers whose weights are the same, with or without other rows."""

_NAMES = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"^model\.embed_tokens\.", "tok_embeddings."),
        (r"^model\.norm\.", "norm."),
        (r"^model\.layers\.", "layers."),
        (r"\.self_attn\.([qkv])_proj\.", r".attention.w\1."),
        (r"\.self_attn\.o_proj\.", ".attention.wo."),
        (r"\.self_attn\.kv_a_proj_with_mqa\.", ".attention.wkv_a."),
        (r"\.self_attn\.kv_a_layernorm\.", ".attention.kv_norm."),
        (r"\.self_attn\.kv_b_proj\.", ".attention.wkv_b."),
        (r"\.self_attn\.q_a_proj\.", ".attention.wq_a."),
        (r"\.self_attn\.q_a_layernorm\.", ".attention.q_norm."),
        (r"\.self_attn\.q_b_proj\.", ".attention.wq_b."),
        (r"\.self_attn\.([qk])_norm\.", r".attention.\1_norm."),
        (r"\.(?:mlp|block_sparse_moe)\.gate\.weight$", ".moe.router.gate.weight"),
        (r"\.mlp\.gate\.e_score_correction_bias$", ".moe.expert_bias"),
        (r"\.mlp\.shared_experts\.gate_proj\.", ".moe.shared_experts.w1."),
        (r"\.mlp\.shared_experts\.up_proj\.", ".moe.shared_experts.w3."),
        (r"\.mlp\.shared_experts\.down_proj\.", ".moe.shared_experts.w2."),
        (r"\.mlp\.gate_proj\.", ".feed_forward.w1."),
        (r"\.mlp\.up_proj\.", ".feed_forward.w3."),
        (r"\.mlp\.down_proj\.", ".feed_forward.w2."),
        (r"\.input_layernorm\.", ".attention_norm."),
        (r"\.post_attention_layernorm\.", ".ffn_norm."),
    )
)
_EXPERT_PART = {"gate_proj": "w1", "w1": "w1", "up_proj": "w3", "w3": "w3", "down_proj": "w2", "w2": "w2"}
_VERSIONS = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\.attention\.qkv_linear\.w", ".attention.w"),
        (r"(^|\.)output\.weight$", r"\1lm_head.weight"),
        (r"\.moe\.(?:routed_experts\.)?(?:inner_experts|experts)\.(w[123])(?:_EFD|_EDF)?$", r".moe.experts.\1"),
        (r"\.moe\.shared_expert\.", ".moe.shared_experts."),
        (r"\.moe\.expert_bias_E$", ".moe.expert_bias"),
    )
)
"""Names of other versions of torchtitan."""


def torchtitan_name(name: str) -> NewName:
    """A name of transformers' as this package spells torchtitan's."""
    if match := EXPERT.match(name):
        layer = match[1].removeprefix("model.")
        return f"{layer}.moe.experts.{_EXPERT_PART[match[4]]}", (int(match[3]), "all")
    for pattern, new in _NAMES:
        name = pattern.sub(new, name)
    return name, None


def newest_torchtitan(name: str, shape: GPTShape) -> str:
    """A name as torchtitan of 2026 has it, which is what is written."""
    if not shape.multi_latent_attention:
        name = re.sub(r"\.attention\.(w[qkv])\.", r".attention.qkv_linear.\1.", name)
    name = re.sub(r"\.moe\.experts\.(w[13])$", r".moe.routed_experts.inner_experts.\1_EFD", name)
    name = re.sub(r"\.moe\.experts\.w2$", ".moe.routed_experts.inner_experts.w2_EDF", name)
    return re.sub(r"\.moe\.expert_bias$", ".moe.expert_bias_E", name)


def without_versions(key: str) -> str:
    """A key as this module spells it, of any version."""
    for pattern, new in _VERSIONS:
        key = pattern.sub(new, key)
    return key


_ROTATED = re.compile(r"\.attention\.w[qk]\.")


def interleaved(naming: Naming, shape: GPTShape) -> Naming:
    """Channel i of a head's first half is theirs at 2 i, of its second at 2 i + 1."""
    channels, half = shape.kv_channels, shape.kv_channels // 2
    weights = []
    for weight in naming.weights:
        runs: list[RowRun] = []
        for run in weight.runs:
            if not _ROTATED.search(run.name):
                runs.append(run)
                continue
            runs += [
                RowRun(run.name, run.start + head + part, run.row + head + part * half, half, step=2)
                for head in range(0, run.rows, channels)
                for part in (0, 1)
            ]
        weights.append(dataclasses.replace(weight, runs=tuple(runs)))
    return dataclasses.replace(naming, weights=tuple(weights))
