"""Quantized tensors of Transformer Engine: allocated, filled, read; in fp8 here, in fp4 by nvfp4.py. Formats that are
not emulated raise NotImplementedError.

A multiplication takes each operand by rows or by columns, and reads the copy that the hardware would: where one is
stale or absent, the result is wrong or an error here, too.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.gpu_path.te import formats, nvfp4
from tests.gpu_path.te.kernels import FP8_NAMES, kernel, rows, torch_dtype, write


def is_quantized(tensor: Any) -> bool:
    return hasattr(tensor, "_fp8_dtype") or hasattr(tensor, "_fp4_dtype")


def _kind(quantizer_or_tensor: Any) -> str:
    name = type(quantizer_or_tensor).__name__
    for part, kind in {"MXFP8": "mx", "Float8Block": "block", "NVFP4": "nvfp4", "Float8": "tensor"}.items():
        if part in name:
            return kind
    raise NotImplementedError(f"{name} is not emulated")


def one_copy_serves_both() -> bool:
    """From Blackwell on fp8 matrices are multiplied in any order; before, a transposed copy is needed."""
    return torch.cuda.get_device_capability() >= (10, 0)


@kernel
def create_empty_quantized_tensor(
    quantizer: Any, shape: list[int], dtype: torch.dtype, device: torch.device, pin_memory: bool = False
) -> Any:
    if _kind(quantizer) == "tensor":
        tensors, of_its_kind = _per_tensor_buffers(quantizer, shape, device)
        cls = _per_tensor_class(quantizer.internal)
    elif _kind(quantizer) == "nvfp4":
        metadata, tensors = quantizer.storage_metadata(dtype), nvfp4.buffers(quantizer, shape, device)
        cls, of_its_kind = metadata["cls"], metadata["nontensor_kwargs"]
        of_its_kind["with_gemm_swizzled_scales"] = nvfp4.scales_are_swizzled(quantizer, shape)
    else:
        specs = quantizer.inner_tensor_specs(tuple(shape))
        tensors = dict.fromkeys(["rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv"])
        tensors |= {name[1:]: torch.empty(size, dtype=kind, device=device) for name, (size, kind) in specs.items()}
        metadata = quantizer.storage_metadata(dtype)
        cls, of_its_kind = metadata["cls"], metadata["nontensor_kwargs"]
    given = {key: value for key, value in of_its_kind.items() if key not in ("quantizer", "fake_dtype")}
    given |= {"fp8_dtype": quantizer.dtype} if _kind(quantizer) != "nvfp4" else {}
    given |= {"quantizer": quantizer, **tensors}
    if quantizer.internal:
        return cls(**given, fake_dtype=dtype)
    stride = torch.empty(shape, device="meta").stride()
    return cls(**given, shape=list(shape), stride=list(stride), dtype=dtype, device=device)


def _per_tensor_class(internal: bool) -> type:
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    return Float8TensorStorage if internal else Float8Tensor


def _per_tensor_buffers(
    quantizer: Any, shape: list[int], device: torch.device
) -> tuple[dict[str, Any], dict[str, Any]]:
    both = one_copy_serves_both()
    data = transpose = None
    if quantizer.rowwise_usage or both:
        data = torch.empty(shape, dtype=torch.uint8, device=device)
    if quantizer.columnwise_usage and not both:
        transpose = torch.empty([shape[-1], *shape[:-1]], dtype=torch.uint8, device=device)
    # Delayed scaling fills it at allocation, since its scale is known; current scaling when it quantizes.
    scale = getattr(quantizer, "scale", None)
    scale_inv = torch.empty(1, device=device) if scale is None else scale.reciprocal().reshape(1).to(device)
    return {"data": data, "data_transpose": transpose, "fp8_scale_inv": scale_inv}, {}


@kernel
def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    if output is None:
        output = create_empty_quantized_tensor(quantizer, list(tensor.shape), tensor.dtype, tensor.device)
    elif _kind(quantizer) == "tensor":
        _take_what_is_used(output, quantizer, tensor)
    elif _kind(quantizer) == "nvfp4":
        nvfp4.take_what_is_used(output, quantizer, tensor)
    if tensor.numel() == 0:
        return output
    fill = {"tensor": _quantize_per_tensor, "block": _quantize_blocks, "mx": _quantize_mx, "nvfp4": nvfp4.quantize}
    fill[_kind(quantizer)](rows(tensor.detach()), quantizer, output, noop)
    return output


def _take_what_is_used(output: Any, quantizer: Any, tensor: Tensor) -> None:
    """The real one drops and allocates the copies of an existing tensor as its quantizer asks (convert_and_update)."""
    both = one_copy_serves_both()
    needs_data, needs_transpose = quantizer.rowwise_usage or both, quantizer.columnwise_usage and not both
    empty = partial(torch.empty, dtype=torch.uint8, device=tensor.device)
    if not needs_data:
        output._data = None
    elif output._data is None:
        output._data = empty(tensor.shape)
    if not needs_transpose:
        output._transpose = None
    elif output._transpose is None:
        output._transpose = empty([tensor.shape[-1], *tensor.shape[:-1]])
    output._transpose_invalid = not needs_transpose


def _quantize_per_tensor(values: Tensor, quantizer: Any, output: Any, noop: Tensor | None) -> None:
    format, values = torch_dtype(quantizer.dtype, torch.float32), values.float()
    amax = values.abs().max()
    if hasattr(quantizer, "scale"):  # delayed: the scale is an earlier step's
        if quantizer.amax.numel():  # where it is not wanted, the real kernel gets a null pointer
            quantizer.amax.copy_(torch.maximum(quantizer.amax, amax.reshape(quantizer.amax.shape)))
        scale = quantizer.scale.reshape(())
    else:
        if quantizer.with_amax_reduction:
            group = quantizer.amax_reduction_group
            torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=group)
        scale = formats.scale_from_amax(amax, format, quantizer.amax_epsilon, quantizer.force_pow_2_scales)
    data = formats.cast(values, scale, format)
    write(output._scale_inv, scale.reciprocal(), noop)
    if output._data is not None:
        write(output._data, data, noop)
    if output._transpose is not None:
        write(output._transpose, data.t(), noop)
        output._transpose_invalid = False


def _quantize_blocks(values: Tensor, quantizer: Any, output: Any, noop: Tensor | None) -> None:
    """Of 128 x 128 (weights) or of 1 x 128 elements along what a multiplication sums over. The copy for columns is
    transposed."""
    format, values = torch_dtype(quantizer.dtype, torch.float32), values.float()
    square = quantizer.block_scaling_dim == 2
    for columnwise, data, scale_inv in (
        (False, output._rowwise_data, output._rowwise_scale_inv),
        (True, output._columnwise_data, output._columnwise_scale_inv),
    ):
        if data is None:
            continue
        matrix = values.t() if columnwise else values
        height = formats.BLOCK if square else 1
        amax = formats.blocks_amax(matrix, height, formats.BLOCK)
        scale = formats.scale_from_amax(amax, format, quantizer.amax_epsilon, quantizer.force_pow_2_scales)
        shape = (matrix.shape[0], matrix.shape[1])
        write(data, formats.cast(matrix, formats.spread(scale, height, formats.BLOCK, shape), format), noop)
        inverse = scale.reciprocal() if square else scale.reciprocal().t()
        write(scale_inv[: inverse.shape[0], : inverse.shape[1]], inverse, noop)


def _quantize_mx(values: Tensor, quantizer: Any, output: Any, noop: Tensor | None) -> None:
    """Of 32 elements along what a multiplication sums over; nothing is transposed."""
    if quantizer.with_2d_quantization:
        raise NotImplementedError("mxfp8 with square blocks is not emulated")
    format, values = torch_dtype(quantizer.dtype, torch.float32), values.float()
    for (height, width), data, scale_inv in (
        ((1, formats.MX_BLOCK), output._rowwise_data, output._rowwise_scale_inv),
        ((formats.MX_BLOCK, 1), output._columnwise_data, output._columnwise_scale_inv),
    ):
        if data is None:
            continue
        exponents = formats.mx_exponents(formats.blocks_amax(values, height, width), format)
        scale = formats.spread(
            formats.powers_of_2(exponents, inverse=True), height, width, (values.shape[0], values.shape[1])
        )
        write(data, formats.cast(values, scale, format), noop)
        write(scale_inv[: exponents.shape[0], : exponents.shape[1]], exponents, noop)


def values_of(tensor: Any, columnwise: bool) -> Tensor:
    """fp32 [rows, n] of a plain tensor, or of a quantized one's copy for that direction."""
    if not is_quantized(tensor):
        return rows(tensor.detach()).float()
    kind = _kind(tensor)
    if kind == "nvfp4":
        return nvfp4.values_of(tensor, columnwise)
    format = FP8_NAMES[int(tensor._fp8_dtype)]
    if kind == "tensor":
        if columnwise and not one_copy_serves_both():
            assert tensor._transpose is not None and not tensor._transpose_invalid, "an fp8 operand has no transpose"
            transposed = tensor._transpose.reshape(tensor._transpose.shape[0], -1)
            return formats.uncast(transposed, tensor._scale_inv, format).t()
        assert tensor._data is not None, "an fp8 operand has no data by rows"
        return formats.uncast(rows(tensor._data), tensor._scale_inv, format)
    data = tensor._columnwise_data if columnwise else tensor._rowwise_data
    scale_inv = tensor._columnwise_scale_inv if columnwise else tensor._rowwise_scale_inv
    assert data is not None, f"an fp8 operand has no data by {'columns' if columnwise else 'rows'}"
    if kind == "block":
        return _from_blocks(data, scale_inv, format, tensor._is_2D_scaled, columnwise)
    height, width = (formats.MX_BLOCK, 1) if columnwise else (1, formats.MX_BLOCK)
    matrix = rows(data)
    shape = (matrix.shape[0], matrix.shape[1])
    # scale_inv is padded to whole tiles of the hardware's
    scales = formats.spread(formats.powers_of_2(scale_inv), height, width, shape)
    return formats.uncast(matrix, scales, format)


def _from_blocks(data: Tensor, scale_inv: Tensor, format: torch.dtype, square: bool, columnwise: bool) -> Tensor:
    matrix = data.reshape(data.shape[0], -1) if columnwise else rows(data)
    height = formats.BLOCK if square else 1
    scales = scale_inv if square else scale_inv.t()
    found = formats.uncast(
        matrix, formats.spread(scales, height, formats.BLOCK, (matrix.shape[0], matrix.shape[1])), format
    )
    return found.t() if columnwise else found


@kernel
def dequantize(input: Any, otype: Any) -> Tensor:
    columnwise = getattr(input, "_data", None) is None and getattr(input, "_rowwise_data", None) is None
    return values_of(input, columnwise).reshape(tuple(input.size())).to(torch_dtype(otype, torch.float32))


@kernel
def fp8_transpose(input: Tensor, dtype: Any, *, out: Tensor | None = None) -> Tensor:
    """[..., n] -> [n, ...]."""
    if out is None:
        return input.movedim(-1, 0).contiguous()
    return out.copy_(rows(input).t().reshape(out.shape))


@kernel
def bgrad_quantize(input: Tensor, quantizer: Any) -> list[Any]:
    return [rows(input).float().sum(0).to(input.dtype), quantize(input, quantizer)]


@kernel
def split_quantize(
    tensor: Tensor, split_sections: list[int], quantizer_list: list[Any], disable_bulk_allocation: bool = False
) -> list[Any]:
    parts = torch.split(tensor, list(split_sections))
    return [quantize(part, quantizer) for part, quantizer in zip(parts, quantizer_list, strict=True)]


@kernel
def multi_tensor_quantize(tensor_list: list[Tensor], quantizer_list: list[Any]) -> list[Any]:
    return [quantize(tensor, quantizer) for tensor, quantizer in zip(tensor_list, quantizer_list, strict=True)]


@kernel
def swizzle_scales_for_gemm_(tensor: Any) -> None:
    """The order in which the hardware wants scales is no concern of values; that they are in it, is noted."""
    if hasattr(tensor, "_with_gemm_swizzled_scales"):
        tensor._with_gemm_swizzled_scales = True


@kernel
def compute_amax(input: Tensor, amax: Tensor) -> None:
    amax.copy_(input.detach().float().abs().max().reshape(amax.shape))


@kernel
def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: Tensor,
    amax_histories: list[Tensor],
    scales: list[Tensor],
    amax_compute_algo: str,
    fp8_dtype: Any,
    margin: float,
) -> None:
    """Delayed scaling between two steps: histories [length, n] move on, scales [n] follow their maxima."""
    top = formats.largest(torch_dtype(fp8_dtype, torch.float32))
    at = 0
    for history, scale in zip(amax_histories, scales, strict=True):
        if amax_reduction_buffer.numel() >= at + scale.numel():
            history[0].copy_(amax_reduction_buffer[at : at + scale.numel()])
        at += scale.numel()
        amax = history[0] if amax_compute_algo == "most_recent" else history.amax(0)
        usable = (amax > 0) & torch.isfinite(amax)
        scale.copy_(torch.where(usable, top / torch.where(usable, amax, 1.0) / 2**margin, scale))
        history.copy_(torch.roll(history, -1, 0))
        history[0].zero_()
