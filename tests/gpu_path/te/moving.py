"""Kernels that move rows and rotate positions: rotary embeddings, padding for fp8, orders of dimensions."""

from typing import Any

import torch
from torch import Tensor

from tests.gpu_path.te.enums import NVTE_QKV_Format
from tests.gpu_path.te.kernels import kernel


def _rotated(x: Tensor, interleaved: bool) -> Tensor:
    """The quarter turn: (-x2, x1), of halves, or of neighbours."""
    if interleaved:
        return torch.stack([-x[..., 1::2], x[..., 0::2]], -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def _own_positions(freqs: Tensor, length: int, cp_size: int, cp_rank: int) -> Tensor:
    """Of a rank that holds the chunks cp_rank and 2 * cp_size - 1 - cp_rank of a sequence."""
    if cp_size == 1:
        return freqs[:length]
    chunks = freqs[: length * cp_size].chunk(2 * cp_size)
    return torch.cat([chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]])


def _rope(
    input: Tensor, freqs: Tensor, qkv_format: Any, interleaved: bool, cp_size: int, cp_rank: int, sign: int
) -> Tensor:
    """RoPE (arXiv 2104.09864) on the first freqs.shape[-1] of each head's elements. freqs: [s, 1, 1, d2], angles."""
    if qkv_format not in (NVTE_QKV_Format["NVTE_SBHD"], NVTE_QKV_Format["NVTE_BSHD"]):
        raise NotImplementedError("rotary embeddings of packed sequences are not emulated")
    first = qkv_format == NVTE_QKV_Format["NVTE_SBHD"]
    angles = _own_positions(freqs, input.shape[0 if first else 1], cp_size, cp_rank).float()
    angles = angles if first else angles.transpose(0, 1)
    turned, rest = input[..., : freqs.shape[-1]].float(), input[..., freqs.shape[-1] :]
    turned = turned * angles.cos() + sign * _rotated(turned * angles.sin(), interleaved)
    return torch.cat([turned.to(input.dtype), rest], -1)


@kernel
def fused_rope_forward(
    input: Tensor, freqs: Tensor, start_positions: Tensor | None, qkv_format: Any, interleaved: bool,
    cu_seqlens: Tensor | None, cp_size: int, cp_rank: int,
) -> Tensor:  # fmt: skip
    return _rope(input, freqs, qkv_format, interleaved, cp_size, cp_rank, 1)


@kernel
def fused_rope_backward(
    output_grads: Tensor, freqs: Tensor, start_positions: Tensor | None, qkv_format: Any,
    interleaved: bool, cu_seqlens: Tensor | None, cp_size: int, cp_rank: int,
) -> Tensor:  # fmt: skip
    return _rope(output_grads, freqs, qkv_format, interleaved, cp_size, cp_rank, -1)


@kernel
def fused_multi_row_padding(
    input: Tensor, output: Tensor, input_row_list: list[int], padded_input_row_list: list[int]
) -> None:
    """Each group of rows, and zeros up to its padded length."""
    at = to = 0
    for own, padded in zip(input_row_list, padded_input_row_list, strict=True):
        output[to : to + own].copy_(input[at : at + own])
        output[to + own : to + padded].zero_()
        at, to = at + own, to + padded


@kernel
def fused_multi_row_unpadding(
    input: Tensor, output: Tensor, input_row_list: list[int], unpadded_input_row_list: list[int]
) -> None:
    at = to = 0
    for padded, own in zip(input_row_list, unpadded_input_row_list, strict=True):
        output[to : to + own].copy_(input[at : at + own])
        at, to = at + padded, to + own


@kernel
def swap_first_dims(tensor: Tensor, out: Tensor | None = None) -> Tensor:
    swapped = tensor.transpose(0, 1).contiguous()
    return swapped if out is None else out.copy_(swapped.view(out.shape))
