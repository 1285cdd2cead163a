"""E2M1, four bits: the numbers 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. Codes 0 to 15, the sign in bit 3; two a
byte, the first in the low bits.

Sources: OCP Microscaling Formats 1.0, 5.3.3; Pretraining Large Language Models with NVFP4 (arXiv 2509.25149) for
stochastic rounding.
"""

import itertools

import torch
from torch import Tensor

NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""By code."""
LARGEST = NUMBERS[-1]


def nearest(values: Tensor) -> Tensor:
    """uint8 codes of the nearest numbers, of two equally near ones that with an even code; saturated."""
    size, code = values.abs(), torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    for below, (number, above) in enumerate(itertools.pairwise(NUMBERS)):
        middle = (number + above) / 2
        code += size > middle if below % 2 == 0 else size >= middle
    return _signed(code, values)


def stochastic(values: Tensor) -> Tensor:
    """uint8 codes of one of the two numbers beside each value, by chance, so that the mean is the value; saturated.
    Draws from the device's default generator."""
    size, code = values.abs().clamp(max=LARGEST), torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    for above in NUMBERS[1:]:
        code += size >= above
    floor, next_one = magnitudes(code), magnitudes((code + 1).clamp(max=7))
    share = (size - floor) / (next_one - floor).clamp(min=0.5)
    return _signed(code + (torch.rand(values.shape, device=values.device) < share), values)


def _signed(code: Tensor, values: Tensor) -> Tensor:
    return torch.where(torch.signbit(values), code + 8, code)


def magnitudes(codes: Tensor) -> Tensor:
    """fp32, of codes without a sign: two bits of exponent, biased by 1, and one of mantissa."""
    exponent, mantissa = codes >> 1, (codes & 1).float()
    return torch.where(exponent == 0, mantissa / 2, (2 + mantissa) * (1 << exponent.int()) / 4)


def numbers(codes: Tensor) -> Tensor:
    """fp32."""
    size = magnitudes(codes & 7)
    return torch.where(codes > 7, -size, size)


def pack(codes: Tensor) -> Tensor:
    """uint8 [m, n] -> [m, n / 2]."""
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def unpack(data: Tensor) -> Tensor:
    """uint8 [m, n / 2] -> codes [m, n]."""
    return torch.stack([data & 15, data >> 4], -1).flatten(-2)
