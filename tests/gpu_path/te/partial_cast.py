"""Weights that are kept in fp8, quantized from a data rank's slice of their fp32 ones (csrc/extensions/
fp8_partial_cast.cpp, multi_tensor/compute_scale.cpp).

A slice is a flat range of a matrix [h, w], from element start_offset on. Scales come from the largest values of all
slices, which Transformer Engine's Python reduces between the two kernels.
"""

from typing import Any

import torch
from torch import Tensor

from tests.gpu_path.te import formats
from tests.gpu_path.te.kernels import kernel, torch_dtype


@kernel
def multi_tensor_compute_scale_and_scale_inv(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    max_fp8: float,
    force_pow_2_scales: bool,
    epsilon: float,
) -> None:
    """Lists of largest values, scales and their reciprocals, of any shape."""
    format = next(one for one in (torch.float8_e4m3fn, torch.float8_e5m2) if formats.largest(one) == max_fp8)
    for amax, scale, scale_inv in zip(*tensor_lists, strict=True):
        scale.copy_(formats.scale_from_amax(amax, format, epsilon, force_pow_2_scales))
        scale_inv.copy_(scale.reciprocal())


@kernel
def fp8_block_scaling_compute_partial_amax(
    tensor: Tensor, amax: Tensor, h: int, w: int, start_offset: int, block_len: int
) -> None:
    """amax has a row and a column for each block at least; blocks without an element of the slice get 0."""
    whole = torch.zeros(h * w, device=tensor.device)
    whole[start_offset : start_offset + tensor.numel()] = tensor.reshape(-1).float()
    found = formats.blocks_amax(whole.view(h, w), block_len, block_len)
    amax[: found.shape[0], : found.shape[1]] = found


@kernel
def fp8_block_scaling_partial_cast(
    inp: Tensor, out: Tensor, scale: Tensor, h: int, w: int, start_offset: int, block_len: int, out_dtype: Any
) -> None:
    """out: uint8, as many elements as the slice inp."""
    scales = formats.spread(scale, block_len, block_len, (h, w)).reshape(-1)
    values = inp.reshape(-1).float()
    part = scales[start_offset : start_offset + values.numel()]
    out.copy_(formats.cast(values, part, torch_dtype(out_dtype, torch.float8_e4m3fn)).view(out.shape))
