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
        settings["fp8_param"] = precision.fp8_param_gather
    if precision.fp4 is not None:
        settings |= {"fp4": precision.fp4, "fp4_recipe": precision.fp4_recipe}
    return settings


def param_gather_settings(precision: PrecisionConfig) -> dict[str, Any]:
    """Fields of mcore's DistributedDataParallelConfig for weights in fp8; mxfp8's, of which there are two copies, are
    gathered in bf16 where gradients will be."""
    if not precision.fp8_param_gather:
        return {}
    return {"fp8_param_gather": True, "reuse_grad_buf_for_mxfp8_param_ag": precision.fp8_recipe == "mxfp8"}


def optimizer_settings(precision: PrecisionConfig) -> dict[str, Any]:
    """Fields of mcore's OptimizerConfig. fp16 and bf16 get fp32 main weights; fp16 gets a loss scaler."""
    settings = {
        "params_dtype": params_dtype(precision),
        "fp16": precision.dtype == "fp16",
        "bf16": precision.dtype == "bf16",
        "loss_scale": precision.loss_scale,
        "initial_loss_scale": precision.initial_loss_scale,
        "min_loss_scale": precision.min_loss_scale,
        "loss_scale_window": precision.loss_scale_window,
        "hysteresis": precision.hysteresis,
    }
    if precision.fp8_param_gather:
        settings["fp8_recipe"] = precision.fp8_recipe
        settings["reuse_grad_buf_for_mxfp8_param_ag"] = precision.fp8_recipe == "mxfp8"
    return settings
