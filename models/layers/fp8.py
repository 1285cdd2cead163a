"""Which fp8 or fp4 recipe this rank's card multiplies by, and whether it and the software can."""

from dataclasses import replace
from typing import Any, Literal

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE

from parallel.config import PrecisionConfig
from program.errors import SharedMistake

AVAILABLE = {
    "delayed": "is_fp8_available",
    "tensorwise": "is_fp8_available",
    "blockwise": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
    "nvfp4": "is_nvfp4_available",
}
"""Transformer Engine's own answer for each recipe."""


def resolve_recipe(precision: PrecisionConfig, device: torch.device) -> PrecisionConfig:
    """precision with a recipe in place of "auto": by what Transformer Engine says of the card's compute capability.

    Raises SharedMistake where a GPU would compute in 16 bits instead, or fail at its first step. A CPU computes in 16
    bits, and the run says so.
    """
    name = precision.products
    if name is None:
        return precision
    if device.type == "cuda" and not HAVE_TE:
        raise SharedMistake(
            f'precision.{name} = "{getattr(precision, name)}" needs Transformer Engine, which is not installed here. '
            f'Install it (docs/quickstart.md, "On GPUs"), or leave precision.{name} out: the run then computes in bf16.'
        )
    if precision.fp8 is not None and precision.fp8_recipe == "auto":
        has_mxfp8 = device.type == "cuda" and _available("mxfp8")[0]
        # mxfp8 scales 32 elements at a time and needs no range of e5m2; with it, training diverges
        recipe: Literal["mxfp8", "tensorwise"] = "mxfp8" if has_mxfp8 and precision.fp8 == "e4m3" else "tensorwise"
        precision = replace(precision, fp8_recipe=recipe)
    if device.type == "cuda":
        _check(precision, device)
    return precision


def _available(recipe: str) -> tuple[bool, str]:
    """Whether the card can, and why not."""
    import transformer_engine.pytorch as te

    answer: Any = getattr(te, AVAILABLE[recipe])
    available, reason = answer(return_reason=True)
    return available, reason


def _check(precision: PrecisionConfig, device: torch.device) -> None:
    available, reason = _available(precision.recipe)
    if not available:
        major, minor = torch.cuda.get_device_capability(device)
        raise SharedMistake(
            f'precision.{precision.products}_recipe = "{precision.recipe}" cannot run on '
            f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor}): {reason.rstrip('.')}. Hopper "
            "runs tensorwise, delayed and blockwise, Blackwell mxfp8 and, with precision.fp4, nvfp4 too; without "
            f"precision.{precision.products} the run computes in bf16."
        )
