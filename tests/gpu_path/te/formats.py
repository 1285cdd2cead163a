"""The fp8 formats: what a tensor's values become in each, and what they are again. Values are fp32 matrices [rows, n].

Sources: FP8 Formats for Deep Learning (arXiv 2209.05433); OCP Microscaling Formats 1.0 for 32-element blocks with a
power of two as scale; Transformer Engine's documentation of its recipes. Rounding is torch's, to nearest even.
"""

import torch
from torch import Tensor

MX_BLOCK = 32
"""Elements that share a scale in mxfp8."""
BLOCK = 128
"""Elements, or rows and columns, that share a scale in Transformer Engine's blockwise recipe."""


def largest(format: torch.dtype) -> float:
    return torch.finfo(format).max


def cast(values: Tensor, scale: Tensor, format: torch.dtype) -> Tensor:
    """uint8: values times scale, saturated."""
    top = largest(format)
    return (values * scale).clamp(-top, top).to(format).view(torch.uint8)


def uncast(data: Tensor, scale_inv: Tensor, format: torch.dtype) -> Tensor:
    return data.view(format).float() * scale_inv


def scale_from_amax(amax: Tensor, format: torch.dtype, epsilon: float = 0.0, power_of_2: bool = False) -> Tensor:
    """That takes amax to the format's largest number; 1 where amax is no use."""
    amax = amax.clamp(min=epsilon)
    usable = (amax > 0) & torch.isfinite(amax)
    scale = torch.where(usable, largest(format) / torch.where(usable, amax, 1.0), 1.0)
    scale = scale.clamp(max=torch.finfo(torch.float32).max)
    return round_down_to_power_of_2(scale) if power_of_2 else scale


def round_down_to_power_of_2(scale: Tensor) -> Tensor:
    return (scale.view(torch.int32) & 0x7F800000).view(torch.float32)


def mx_exponents(amax: Tensor, format: torch.dtype) -> Tensor:
    """uint8, biased by 127: the smallest power of two by which amax must be divided to be within the format."""
    bits = (amax / largest(format)).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    return (exponent + (mantissa > 0)).clamp(0, 254).to(torch.uint8)


def powers_of_2(exponents: Tensor, inverse: bool = False) -> Tensor:
    """2 ** (exponent - 127), or one over it: an fp32 number's bits."""
    biased = exponents.to(torch.int32)
    biased = 254 - biased if inverse else biased
    return torch.where(biased > 0, biased << 23, 1 << 22).to(torch.int32).view(torch.float32)  # 2**-127 is subnormal


def blocks_amax(values: Tensor, rows: int, columns: int) -> Tensor:
    """[m, n] -> [m / rows, n / columns], rounded up: the largest magnitude in each block."""
    m, n = values.shape
    padded = torch.nn.functional.pad(values.abs(), (0, -n % columns, 0, -m % rows))
    return padded.view(-1, rows, padded.shape[1] // columns, columns).amax(dim=(1, 3))


def spread(scales: Tensor, rows: int, columns: int, shape: tuple[int, int]) -> Tensor:
    """Each block's scale for each of its elements: blocks_amax's shape -> [m, n]."""
    return scales.repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(columns, 1)[:, : shape[1]]
