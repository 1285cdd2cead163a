"""A hook: how often each fused kernel is called, in ``calls-RANK.json`` of the folder FUSION_CALLS, after each step.

Counted where the fused path begins: a test of "on" against "off" would else hold where both are off.
"""

import collections
import functools
import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from training import train

SWIGLU = "megatron.core.fusions.fused_bias_swiglu"
ENTRIES: dict[str, list[tuple[str, str]]] = {
    "bias_activation_fusion": [
        (SWIGLU, "swiglu"),
        (SWIGLU, "weighted_swiglu"),
        ("megatron.core.fusions.fused_bias_gelu", "bias_gelu"),
        ("megatron.core.fusions.fused_bias_geglu", "geglu"),
    ],
    "apply_rope_fusion": [
        ("transformer_engine_torch", "fused_rope_forward"),
        ("megatron.core.transformer.multi_latent_attention", "fused_apply_mla_rope_for_q"),
    ],
    "cross_entropy_loss_fusion": [("transformer_engine.pytorch.triton.cross_entropy", "cross_entropy_forward")],
    "gradient_accumulation_fusion": [("models.layers.wgrad", "accumulate")],
    "moe_grouped_gemm": [("transformer_engine_torch", "te_general_grouped_gemm")],
    "moe_permute_fusion": [("transformer_engine.pytorch.triton.permutation", "permute_with_mask_map")],
    "moe_router_fusion": [
        ("transformer_engine_torch", "fused_topk_with_score_function_fwd"),
        ("transformer_engine_torch", "fused_moe_aux_loss_fwd"),
    ],
    "moe_shared_expert_overlap": [("megatron.core.transformer.moe.shared_experts", "SharedExpertMLP.get_output")],
}
"""By field of the section ``kernels``: (module, name in it)."""

calls: collections.Counter[str] = collections.Counter()


def counted[**P, R](name: str, function: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        calls[name] += 1
        return function(*args, **kwargs)

    return call


def accumulating(product: Callable[..., Any]) -> Callable[..., Any]:
    """Products that add to what is there, of Transformer Engine's modules."""

    @functools.wraps(product)
    def call(*args: Any, **kwargs: Any) -> Any:
        calls["accumulating products"] += bool(args[14])
        return product(*args, **kwargs)

    return call


def install() -> None:
    for field, entries in ENTRIES.items():
        for path, name in entries:
            owner: Any = importlib.import_module(path)
            *outer, last = name.split(".")
            for part in outer:
                owner = getattr(owner, part)
            setattr(owner, last, counted(field, getattr(owner, last)))
    extension: Any = importlib.import_module("transformer_engine_torch")
    extension.generic_gemm = accumulating(extension.generic_gemm)


def one_step(*args: Any, **kwargs: Any) -> Any:
    """In place of training.train's."""
    result = step(*args, **kwargs)
    Path(os.environ["FUSION_CALLS"], f"calls-{os.environ['RANK']}.json").write_text(json.dumps(calls))
    return result


step, train.one_step = train.one_step, one_step
install()
