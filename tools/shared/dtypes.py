"""Elements of one dtype as another's, on words: unsigned integers of the dtype's size."""

import functools
from typing import TYPE_CHECKING

import numpy as np

from training.checkpoint.format.reader import WORDS

if TYPE_CHECKING:
    from torch import nn

FLOATS = ("float64", "float32", "float16", "bfloat16")
"""What weights may be, by torch's names."""

TORCH_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""``precision.dtype`` -> torch's name."""

FP8_BLOCK = 128
"""Rows and columns that share a scale in DeepSeek-V3's files."""

_NATIVE = {"float64": np.float64, "float32": np.float32, "float16": np.float16}


def cast(words: np.ndarray, source: str, target: str) -> np.ndarray:
    """Words of ``target``, rounded to nearest, ties to even. The same words where the dtypes are the same."""
    return words if source == target else from_numbers(to_numbers(words, source), target)


def to_numbers(words: np.ndarray, dtype: str) -> np.ndarray:
    """As numbers that numpy knows: fp64 as it is, every other float as fp32, which holds each of them exactly."""
    if dtype == "bfloat16":
        return (words.astype(np.uint32) << 16).view(np.float32)
    if dtype == "float8_e4m3fn":
        return _e4m3()[words]
    numbers = words.view(_NATIVE[dtype])
    return numbers.astype(np.float32) if dtype == "float16" else numbers


def from_numbers(numbers: np.ndarray, dtype: str) -> np.ndarray:
    """Inverse of ``to_numbers``, rounding; what is too large becomes infinite, as torch has it."""
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            rounded = numbers.astype(_NATIVE[dtype], copy=False)
        return rounded.view(WORDS[rounded.dtype.itemsize])
    bits = np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32)
    rounded_up = bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))
    nan = np.isnan(bits.view(np.float32))
    return (np.where(nan, np.uint32(0x7FC00000), rounded_up) >> 16).astype(np.uint16)


def round_weights(model: "nn.Module", dtype: str) -> None:
    """All parameters but the routers' biases, which are never rounded."""
    import torch

    with torch.no_grad():
        for name, param in model.named_parameters():
            if not name.endswith("e_score_correction_bias"):
                param.copy_(param.to(getattr(torch, dtype)))


def dequantised(words: np.ndarray, scales: np.ndarray, first: int) -> np.ndarray:
    """fp8 rows [rows, columns] from row ``first`` of their matrix on, times their blocks' scales: fp32.

    scales: fp32, of the whole matrix, [rows / 128, columns / 128] rounded up.
    """
    rows, columns = words.shape
    of_rows = scales[(first + np.arange(rows)) // FP8_BLOCK]
    return to_numbers(words, "float8_e4m3fn") * np.repeat(of_rows, FP8_BLOCK, axis=1)[:, :columns]


@functools.cache
def _e4m3() -> np.ndarray:
    """All 256 numbers of float8_e4m3fn (OCP 8-bit floating point, table 1): 4 bits of exponent, bias 7, no infinity."""
    codes = np.arange(256)
    sign, exponent, mantissa = np.where(codes & 0x80, -1.0, 1.0), (codes >> 3) & 15, codes & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    numbers = sign * np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    numbers[(codes & 0x7F) == 0x7F] = np.nan
    return numbers.astype(np.float32)
