"""RMSNorm and LayerNorm over the last dimension, in fp32; statistics are kept for the backward pass as [rows]."""

from typing import Any

import torch
from torch import Tensor

from tests.gpu_path.te.kernels import kernel, torch_dtype
from tests.gpu_path.te.quantization import quantize


def _gain(gamma: Tensor, zero_centered: bool) -> Tensor:
    return gamma.detach().float() + (1 if zero_centered else 0)


def _given(result: Tensor, out: Any, quantizer: Any, otype: Any, default: torch.dtype) -> Any:
    result = result.to(torch_dtype(otype, default))
    if quantizer is not None:
        return quantize(result, quantizer, out)
    return result if out is None else out.copy_(result)


@kernel
def rmsnorm_fwd(
    input: Tensor, weight: Tensor, eps: float, ln_out: Any, quantizer: Any, otype: Any, sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:  # fmt: skip
    """[y, None, 1 / rms]."""
    x = input.detach().float()
    inverse = torch.rsqrt(x.square().mean(-1) + eps)
    y = x * inverse.unsqueeze(-1) * _gain(weight, zero_centered_gamma)
    return [_given(y, ln_out, quantizer, otype, input.dtype), None, inverse.flatten()]


@kernel
def rmsnorm_bwd(
    dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> list[Tensor]:
    """[dx, dgamma]."""
    grad, inverse = dz.float().reshape(x.shape), rsigma.view(*x.shape[:-1], 1)
    normed, weighted = x.float() * inverse, dz.float().reshape(x.shape) * _gain(gamma, zero_centered_gamma)
    dx = (weighted - normed * (weighted * normed).mean(-1, keepdim=True)) * inverse
    return [dx.to(x.dtype), (grad * normed).flatten(0, -2).sum(0).to(gamma.dtype)]


@kernel
def layernorm_fwd(
    input: Tensor, weight: Tensor, bias: Tensor | None, eps: float, ln_out: Any, quantizer: Any, otype: Any,
    sm_margin: int, zero_centered_gamma: bool,
) -> list[Any]:  # fmt: skip
    """[y, mean, 1 / standard deviation]."""
    x = input.detach().float()
    mean = x.mean(-1)
    inverse = torch.rsqrt(x.var(-1, unbiased=False) + eps)
    y = (x - mean.unsqueeze(-1)) * inverse.unsqueeze(-1) * _gain(weight, zero_centered_gamma)
    if bias is not None:
        y = y + bias.detach().float()
    return [_given(y, ln_out, quantizer, otype, input.dtype), mean.flatten(), inverse.flatten()]


@kernel
def layernorm_bwd(
    dz: Tensor, x: Tensor, mu: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> list[Tensor]:
    """[dx, dgamma, dbeta]."""
    grad, inverse = dz.float().reshape(x.shape), rsigma.view(*x.shape[:-1], 1)
    normed = (x.float() - mu.view(*x.shape[:-1], 1)) * inverse
    weighted = grad * _gain(gamma, zero_centered_gamma)
    dx = weighted - weighted.mean(-1, keepdim=True) - normed * (weighted * normed).mean(-1, keepdim=True)
    dgamma, dbeta = (each.flatten(0, -2).sum(0).to(gamma.dtype) for each in (grad * normed, grad))
    return [(dx * inverse).to(x.dtype), dgamma, dbeta]
