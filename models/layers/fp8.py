"""Whether this rank's card and software can multiply in the fp8 that a recipe asks for."""

from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE

from parallel.config import PrecisionConfig
from parallel.errors import SharedMistake

AVAILABLE = {
    "delayed": "is_fp8_available",
    "tensorwise": "is_fp8_available",
    "blockwise": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
}
"""Transformer Engine's own answer for each recipe."""


def check_fp8(precision: PrecisionConfig, device: torch.device) -> None:
    """Raises SharedMistake where a GPU would compute in 16 bits instead, or fail at its first step. A CPU computes in
    16 bits, and the run says so."""
    if precision.fp8 is None or device.type == "cpu":
        return
    if not HAVE_TE:
        raise SharedMistake(
            f'precision.fp8 = "{precision.fp8}" needs Transformer Engine, which is not installed here. Install it '
            '(docs/quickstart.md, "On GPUs"), or leave precision.fp8 out: the run then computes in bf16.'
        )
    import transformer_engine.pytorch as te

    answer: Any = getattr(te, AVAILABLE[precision.fp8_recipe])
    available, reason = answer(return_reason=True)
    if not available:
        major, minor = torch.cuda.get_device_capability(device)
        raise SharedMistake(
            f'precision.fp8_recipe = "{precision.fp8_recipe}" cannot run on {torch.cuda.get_device_name(device)} '
            f"(compute capability {major}.{minor}): {reason.rstrip('.')}. Hopper runs tensorwise, delayed and "
            "blockwise, Blackwell mxfp8 too; without precision.fp8 the run computes in bf16."
        )
