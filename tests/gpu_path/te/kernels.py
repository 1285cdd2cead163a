"""What a kernel of the emulated extension is: a function of plain torch, under the name of the real one."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

KERNELS: dict[str, Callable[..., Any]] = {}
"""By name, with the parameters of csrc/extensions/pybind.cpp, in its order."""

FP8_NAMES = {7: torch.float8_e4m3fn, 8: torch.float8_e5m2}
TORCH_DTYPES = {0: torch.uint8, 2: torch.int32, 4: torch.float32, 5: torch.float16, 6: torch.bfloat16, **FP8_NAMES}
"""By the values of transformer_engine.h's enum DType."""


def kernel[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Registers one. The real kernels know nothing of autograd, and so these must not either."""

    @functools.wraps(function)
    def without_gradients(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.no_grad():
            return function(*args, **kwargs)

    KERNELS[function.__name__] = without_gradients
    return without_gradients


def torch_dtype(dtype: Any, default: torch.dtype) -> torch.dtype:
    """Of a member of either DType, the extension's or transformer_engine.pytorch's."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype or default
    return TORCH_DTYPES[int(dtype)]


def rows(tensor: Tensor) -> Tensor:
    """[..., n] -> [rows, n]."""
    return tensor.reshape(-1, tensor.shape[-1])


def write(target: Tensor, values: Tensor, noop: Tensor | None = None) -> None:
    """Not where the flag noop is set, which the host does not read."""
    values = values.reshape(target.shape)
    target.copy_(values if noop is None else torch.where(noop.reshape(()) != 0, target, values))
