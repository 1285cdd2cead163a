"""Weights that Transformer Engine keeps in fp8 (precision.fp8_param_gather): how they get values of 16 bits."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.fp8_utils import is_float8tensor
from torch import Tensor, nn


@contextlib.contextmanager
def plain_weights(chunk: nn.Module) -> Iterator[None]:
    """Within, all of a chunk's weights are plain tensors, without values; then those in fp8 are quantized from them.

    A view of a part of a weight in fp8, such as the gate's rows, could not be filled: its scale is the whole weight's.
    What was filled in stays on the host, where the optimizer takes its fp32 weights from, until it has them
    (megatron-core's distrib_optimizer.py, get_high_precision_init_val); they would else start from 8 bits.
    """
    held: list[tuple[nn.Module, str, Any]] = [
        (module, name, param)
        for module in chunk.modules()
        for name, param in module.named_parameters(recurse=False)
        if kept_in_fp8(param)
    ]
    for module, name, param in held:
        module._parameters[name] = nn.Parameter(torch.empty(param.shape, dtype=param.dtype, device=param.device))
    try:
        yield
    finally:
        for module, name, param in held:
            filled = module._parameters[name]
            assert filled is not None
            module._parameters[name] = param
            quantize(param, filled.detach())
            param._high_precision_init_val = filled.detach().cpu()


def kept_in_fp8(param: Tensor) -> bool:
    """Not a plain tensor: one that says it has 16 bits, and holds 8 of them, with scales."""
    return bool(is_float8tensor(param))


def stored(param: Tensor) -> list[Tensor]:
    """The plain tensors that hold a parameter: itself, or its numbers of 8 bits, their transposed copy, and scales."""
    if not kept_in_fp8(param):
        return [param]
    names, _ = param.__tensor_flatten__()  # type: ignore[attr-defined]
    return [getattr(param, name) for name in names]


def values(param: Tensor) -> Tensor:
    """What its elements are, as a plain tensor: of one in fp8 an fp32 copy."""
    return param.dequantize(dtype=torch.float32) if kept_in_fp8(param) else param  # type: ignore[call-arg]


def forget_amax(param: Any) -> None:
    """The largest value that the recipe "delayed" has seen of a weight since its scales last moved; others have none.

    Before a weight is quantized from other values than it had: its scales would come from these, too.
    """
    if (amax := getattr(param._quantizer, "amax", None)) is not None:
        amax.zero_()


def quantize(param: Any, filled: Tensor) -> None:
    """Give a weight in fp8 the values of a plain tensor, as if it never had others: memory that nothing had filled was
    quantized as the weight was built."""
    forget_amax(param)
    param.quantize_(filled)
