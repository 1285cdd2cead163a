"""nvfp4: E2M1 values, an E4M3 scale for each 16 of them, and an fp32 one for the tensor.

A tensor's copy by columns, from which weights' gradients are multiplied, is transposed and, of inputs and gradients,
turned by a Hadamard matrix: 16 rows at a time, of both factors, so that the product is the same. Weights share a scale
in 16 x 16 blocks, the same in both copies.

Sources: Transformer Engine 2.19.0, csrc/quantizer.cpp (NVFP4Quantizer) and custom_recipes/reference_nvfp4.py, its own
reference; Pretraining Large Language Models with NVFP4 (arXiv 2509.25149).
"""

import math
from typing import Any

import torch
from torch import Tensor

from tests.gpu_path.te import e2m1, formats
from tests.gpu_path.te.kernels import rows, write

BLOCK = 16
"""Elements that share a scale, and rows that are turned together."""
SCALE_FORMAT = torch.float8_e4m3fn
SUMMED = 32
"""A multiplication sums over multiples of: 16 bytes (cuBLAS; megatron/core/fp4_utils.py, get_fp4_align_size)."""
LARGEST = formats.largest(SCALE_FORMAT) * e2m1.LARGEST
"""What a tensor's largest value is scaled to."""


def buffers(quantizer: Any, shape: list[int], device: torch.device) -> dict[str, Tensor | None]:
    """For a tensor's constructor. Raises AssertionError for sizes that the real one refuses."""
    m, n = math.prod(shape[:-1]), shape[-1]
    assert m % BLOCK == 0 and n % BLOCK == 0, f"nvfp4 wants multiples of {BLOCK}, found {m} x {n}"
    if quantizer.row_scaled_nvfp4 or quantizer.nvfp4_use_4over6:
        raise NotImplementedError("nvfp4 with a scale for each row, or 4 over 6, is not emulated")
    names = ("data", "scale_inv")
    found: dict[str, Tensor | None] = dict.fromkeys(
        [f"{way}_{name}" for way in ("rowwise", "columnwise") for name in names] + ["amax_rowwise", "amax_columnwise"]
    )
    specs = quantizer.inner_tensor_specs((m, n))  # of a matrix: by columns, a byte's two values are in two rows of it
    found |= {name[1:]: torch.empty(size, dtype=dtype, device=device) for name, (size, dtype) in specs.items()}
    if (data := found["rowwise_data"]) is not None:
        found["rowwise_data"] = data.view(*shape[:-1], n // 2)
    return found


def scales_are_swizzled(quantizer: Any, shape: list[int]) -> bool:
    """Whether the real kernel writes scales in the order in which they are multiplied."""
    sizes = (math.prod(shape[:-1]) % (64 if quantizer.with_rht else 128), shape[-1] % 128)
    return quantizer.optimize_for_gemm and sizes == (0, 0) and (quantizer.with_rht or quantizer.with_2d_quantization)


def turn(values: Tensor, quantizer: Any) -> Tensor:
    """[m, n]: 16 columns at a time by the quantizer's orthogonal matrix, in bf16 as the kernel writes them."""
    matrix = quantizer.rht_matrix.float()
    return (values.view(values.shape[0], -1, BLOCK) @ matrix).flatten(-2).bfloat16().float()


def encode_scale(amax: Tensor) -> Tensor:
    """fp32: what a tensor is multiplied by, so that a block's scale is an E4M3 number."""
    usable = (amax > 0) & torch.isfinite(amax)
    scale = torch.where(usable, LARGEST / torch.where(usable, amax, 1.0), 1.0)
    return scale.clamp(max=torch.finfo(torch.float32).max)


def block_scales(amax: Tensor, encode: Tensor) -> Tensor:
    """E4M3: that take a block's largest value to 6, over the tensor's."""
    return (amax * (encode * (1 / e2m1.LARGEST))).clamp(max=formats.largest(SCALE_FORMAT)).to(SCALE_FORMAT)


def cast(matrix: Tensor, amax: Tensor, quantizer: Any) -> tuple[Tensor, Tensor]:
    """uint8 [m, n / 2], and the blocks' scales, E4M3 [m, n / 16]."""
    top, encode = torch.finfo(torch.float32).max, encode_scale(amax)
    height = BLOCK if quantizer.with_2d_quantization else 1
    scales = block_scales(formats.blocks_amax(matrix, height, BLOCK), encode)
    factor = (1 / (scales.float() * (1 / encode))).clamp(max=top)
    shape = (matrix.shape[0], matrix.shape[1])
    scaled = matrix * formats.spread(factor, height, BLOCK, shape)
    round_off = e2m1.stochastic if quantizer.stochastic_rounding else e2m1.nearest
    return e2m1.pack(round_off(scaled)), scales.repeat_interleave(height, 0)


def quantize(values: Tensor, quantizer: Any, output: Any, noop: Tensor | None) -> None:
    """values: [m, n]. output: an NVFP4Tensor, or its storage."""
    assert not quantizer.with_rht or values.dtype == torch.bfloat16, "nvfp4 turns bf16 only"
    values = values.float()
    copies = [("rowwise", values)] if output._rowwise_data is not None else []
    if output._columnwise_data is not None:
        turned = turn(values.t(), quantizer) if quantizer.with_rht else values.t()
        copies.append(("columnwise", turned))
    for way, matrix in copies:
        amax = matrix.abs().max()
        if quantizer.with_amax_reduction:
            torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=quantizer.amax_reduction_group)
        data, scales = cast(matrix, amax, quantizer)
        write(getattr(output, f"_amax_{way}"), amax, noop)
        write(getattr(output, f"_{way}_data"), data, noop)
        scale_inv = getattr(output, f"_{way}_scale_inv")  # padded to whole tiles of the hardware's
        write(scale_inv[: scales.shape[0], : scales.shape[1]], scales.view(torch.uint8), noop)


def take_what_is_used(output: Any, quantizer: Any, tensor: Tensor) -> None:
    """The real one drops and allocates the copies of an existing tensor as its quantizer asks (convert_and_update)."""
    for name, fresh in buffers(quantizer, list(tensor.shape), tensor.device).items():
        if fresh is None or getattr(output, f"_{name}") is None:
            setattr(output, f"_{name}", fresh)
    output._with_gemm_swizzled_scales = scales_are_swizzled(quantizer, list(tensor.shape))


def values_of(tensor: Any, columnwise: bool) -> Tensor:
    """fp32 [rows, n]; by columns as they are turned."""
    way = "columnwise" if columnwise else "rowwise"
    data, scale_inv, amax = (getattr(tensor, name) for name in (f"_{way}_data", f"_{way}_scale_inv", f"_amax_{way}"))
    assert data is not None, f"an fp4 operand has no data by {'columns' if columnwise else 'rows'}"
    matrix = data.reshape(data.shape[0], -1) if columnwise else rows(data)
    found = uncast(matrix, scale_inv.view(SCALE_FORMAT), amax)
    return found.t() if columnwise else found


def uncast(data: Tensor, scales: Tensor, amax: Tensor) -> Tensor:
    """fp32 [m, n]."""
    codes = e2m1.unpack(data)
    spread = formats.spread(scales.float(), 1, BLOCK, (codes.shape[0], codes.shape[1]))
    return e2m1.numbers(codes) * spread * (amax.reshape(()) / LARGEST)
