"""E2M1, four bits: the numbers 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. Codes 0 to 15, the sign in bit 3; two a
byte, the first in the low bits.

Sources: OCP Microscaling Formats 1.0, 5.3.3; Pretraining Large Language Models with NVFP4 (arXiv 2509.25149) for
stochastic rounding.
"""

import torch
from torch import Tensor

LARGEST = 6.0


def nearest(values: Tensor) -> Tensor:
    """uint8 codes of the nearest numbers, of two equally near ones that with an even code; saturated."""
    steps, octave = _in_steps(values)
    return _signed(steps.round(), octave, values)


def stochastic(values: Tensor) -> Tensor:
    """uint8 codes of one of the two numbers beside each value, by chance, so that the mean is the value; saturated.
    Draws from the device's default generator."""
    steps, octave = _in_steps(values)
    return _signed((steps + torch.rand_like(steps)).floor(), octave, values)


def _in_steps(values: Tensor) -> tuple[Tensor, Tensor]:
    """Magnitudes in steps of the numbers around them, 0.5 below 2, 1 below 4, and 2, which are octaves 0, 1 and 2."""
    size = values.abs().clamp(max=LARGEST)
    octave = (size >= 2).to(torch.uint8) + (size >= 4)
    return size * 2 / (1 << octave), octave


def _signed(steps: Tensor, octave: Tensor, values: Tensor) -> Tensor:
    return (steps + 2 * octave + 8 * torch.signbit(values)).to(torch.uint8)


def numbers(codes: Tensor) -> Tensor:
    """fp32."""
    size = codes & 7
    octave = (size >= 4).to(torch.uint8) + (size >= 6)
    found = ((size - 2 * octave) << octave).float() / 2
    return torch.where(codes > 7, -found, found)


def pack(codes: Tensor) -> Tensor:
    """uint8 [m, n] -> [m, n / 2]."""
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def unpack(data: Tensor) -> Tensor:
    """uint8 [m, n / 2] -> codes [m, n]."""
    return torch.stack([data & 15, data >> 4], -1).flatten(-2)
