"""The ``precision`` section as Megatron's and Transformer Engine's settings."""

from typing import Any

import torch

from parallel.config import PrecisionConfig

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def params_dtype(precision: PrecisionConfig) -> torch.dtype:
    """Of parameters and activations."""
    return DTYPES[precision.dtype]


def transformer_settings(precision: PrecisionConfig) -> dict[str, Any]:
    """Fields of mcore's TransformerConfig."""
    dtype = params_dtype(precision)
    settings: dict[str, Any] = {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "autocast_dtype": dtype,
        "enable_autocast": False,
        "fp16": precision.dtype == "fp16",
        "bf16": precision.dtype == "bf16",
    }
    if precision.fp8 is not None:
        settings |= {"fp8": precision.fp8, "fp8_recipe": precision.fp8_recipe}
    if precision.fp4 is not None:
        settings |= {"fp4": precision.fp4, "fp4_recipe": precision.fp4_recipe}
    return settings


def optimizer_settings(precision: PrecisionConfig) -> dict[str, Any]:
    """Fields of mcore's OptimizerConfig. fp16 and bf16 get fp32 main weights; fp16 gets a loss scaler."""
    return {
        "params_dtype": params_dtype(precision),
        "fp16": precision.dtype == "fp16",
        "bf16": precision.dtype == "bf16",
        "loss_scale": precision.loss_scale,
        "initial_loss_scale": precision.initial_loss_scale,
        "min_loss_scale": precision.min_loss_scale,
        "loss_scale_window": precision.loss_scale_window,
        "hysteresis": precision.hysteresis,
    }
