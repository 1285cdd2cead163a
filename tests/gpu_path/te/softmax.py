"""Softmax with a mask and a scale, and its gradient, as attention without a fused kernel calls it: [b, heads, q, k]."""

import torch
from torch import Tensor

from tests.gpu_path.te.kernels import kernel


def _forward(input: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    scores = input.float() * scale
    if mask is not None:
        scores = scores.masked_fill(mask.bool(), -10000.0)  # what the kernels put in
    return torch.softmax(scores, -1).to(input.dtype)


def _later(queries: int, keys: int, device: torch.device, shift: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool, device=device).triu(1 + shift)


@kernel
def scaled_softmax_forward(input: Tensor, scale_factor: float) -> Tensor:
    return _forward(input, None, scale_factor)


@kernel
def scaled_masked_softmax_forward(input: Tensor, mask: Tensor, scale_factor: float) -> Tensor:
    return _forward(input, mask, scale_factor)


@kernel
def scaled_upper_triang_masked_softmax_forward(input: Tensor, scale_factor: float) -> Tensor:
    """[b * heads, s, s]."""
    return _forward(input, _later(input.shape[-2], input.shape[-1], input.device, 0), scale_factor)


@kernel
def scaled_aligned_causal_masked_softmax_forward(input: Tensor, scale_factor: float) -> Tensor:
    queries, keys = input.shape[-2:]
    return _forward(input, _later(queries, keys, input.device, keys - queries), scale_factor)


def _backward(output_grad: Tensor, softmax_results: Tensor, scale_factor: float) -> Tensor:
    grad, y = output_grad.float(), softmax_results.float()
    return (scale_factor * y * (grad - (grad * y).sum(-1, keepdim=True))).to(softmax_results.dtype)


@kernel
def scaled_softmax_backward(output_grad: Tensor, softmax_results: Tensor, scale_factor: float) -> Tensor:
    return _backward(output_grad, softmax_results, scale_factor)


@kernel
def scaled_masked_softmax_backward(output_grad: Tensor, softmax_results: Tensor, scale_factor: float) -> Tensor:
    return _backward(output_grad, softmax_results, scale_factor)


@kernel
def scaled_upper_triang_masked_softmax_backward(
    output_grads: Tensor, softmax_results: Tensor, scale_factor: float
) -> Tensor:
    return _backward(output_grads, softmax_results, scale_factor)


@kernel
def scaled_aligned_causal_masked_softmax_backward(
    output_grads: Tensor, softmax_results: Tensor, scale_factor: float
) -> Tensor:
    return _backward(output_grads, softmax_results, scale_factor)
