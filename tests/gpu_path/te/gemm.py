"""Matrix multiplications, in fp32. cuBLAS counts columns first: A is the weight, B what comes in, D = op(B) op(A)."""

from typing import Any

import torch
from torch import Tensor

from tests.gpu_path.te import nvfp4
from tests.gpu_path.te.kernels import kernel, rows, torch_dtype
from tests.gpu_path.te.quantization import quantize, values_of


def _product(a: Any, trans_a: bool, b: Any, trans_b: bool) -> Tensor:
    """[rows, n]. Sums run over a's rows where it is not transposed, and so its copy by columns is read."""
    left, right = values_of(b, columnwise=trans_b), values_of(a, columnwise=not trans_a)
    summed = left.shape[0 if trans_b else 1]
    assert not hasattr(a, "_fp4_dtype") or summed % nvfp4.SUMMED == 0, f"an fp4 product sums over {summed}"
    return (left.t() if trans_b else left) @ (right.t() if trans_a else right)


@kernel
def generic_gemm(
    A: Any,
    transA: bool,
    B: Any,
    transB: bool,
    D: Any,
    quantizer: Any,
    output_dtype: Any,
    bias: Tensor | None,
    bias_type: Any,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> list[Any]:
    """[D, the bias's gradient, what GELU was given, the extra output]."""
    if comm_overlap is not None or gelu:
        raise NotImplementedError("user buffers and GELU within a multiplication are not emulated")
    product = alpha * _product(A, transA, B, transB)
    dtype = torch_dtype(output_dtype, getattr(A, "dtype", torch.float32)) if D is None else D.dtype
    assert dtype == torch_dtype(output_dtype, dtype), f"D is {dtype}, {output_dtype} is asked for"
    bias_grad = None
    if bias is not None and grad:
        bias_grad = values_of(B, columnwise=transB).sum(0).to(dtype)
    elif bias is not None:
        product = product + bias.float()
    if D is not None:
        product = product.reshape(D.shape)
        D.copy_(product + D.float() * (1.0 if beta is None else beta) if accumulate else product)
        return [D, bias_grad, None, extra_output]
    lead = [product.shape[0]] if transB else list(B.size())[:-1]
    result = product.reshape(*lead, product.shape[-1]).to(dtype)
    return [result if quantizer is None else quantize(result, quantizer), bias_grad, None, extra_output]


@kernel
def te_general_grouped_gemm(
    A: list[Any],
    transA: bool,
    B: list[Any],
    transB: bool,
    D: list[Tensor] | None,
    D_type: Any,
    m_splits: list[int],
    bias: list[Tensor],
    bias_type: Any,
    single_output: bool,
    pre_gelu_out: list[Tensor],
    grad: bool,
    workspace: list[Tensor],
    workspaceSizes: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> list[Tensor]:
    """Many at once, one for each expert; without tokens an expert's gradient is zero. The biases' gradients."""
    assert D is not None
    at = 0
    for i, (a, b) in enumerate(zip(A, B, strict=True)):
        product = _product(a, transA, b, transB)
        if i < len(bias) and bias[i] is not None and bias[i].numel():
            if grad:
                bias[i].copy_(values_of(b, columnwise=transB).sum(0))
            else:
                product = product + bias[i].float()
        target = rows(D[0])[at : at + len(product)] if single_output else rows(D[i])
        at += len(product)
        target.copy_(product + target.float() if accumulate else product)
    return bias
