"""What the optimizer runs over lists of tensors at once."""

import torch
from torch import Tensor

from tests.gpu_path.te.kernels import kernel


@kernel
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """The norm of all [1], and of each where asked."""
    (tensors,) = tensor_lists
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors]
    stacked = torch.stack(norms) if norms else torch.zeros(1, device=noop_flag.device)
    return torch.linalg.vector_norm(stacked).reshape(1), stacked if per_tensor else stacked.new_zeros(0)


def _scale(noop_flag: Tensor, tensor_lists: list[list[Tensor]], scale: float | Tensor) -> None:
    for source, target in zip(*tensor_lists, strict=True):
        noop_flag.copy_(torch.where(source.isfinite().all(), noop_flag, 1))
        target.copy_(source * scale)


@kernel
def multi_tensor_scale(chunk_size: int, is_infinite: Tensor, tensor_lists: list[list[Tensor]], scale: float) -> None:
    """Sets the flag at the first NaN or infinity."""
    _scale(is_infinite, tensor_lists, scale)


@kernel
def multi_tensor_scale_tensor(
    chunk_size: int, is_infinite: Tensor, tensor_lists: list[list[Tensor]], scale: Tensor
) -> None:
    _scale(is_infinite, tensor_lists, scale)


@kernel
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Lists of gradients, parameters, first and second moments, and main parameters or not. mode 1 is AdamW
    (arXiv 1711.05101), 0 puts the decay into the gradient."""
    first, second = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    for gradient, parameter, m, v, *main in zip(*tensor_lists, strict=True):
        weight, grad = (main[0] if main else parameter).float(), gradient.float()
        if mode == 0:
            grad = grad + weight_decay * weight
        m.copy_(beta1 * m + (1 - beta1) * grad)
        v.copy_(beta2 * v + (1 - beta2) * grad * grad)
        update = (m.float() / first) / ((v.float() / second).sqrt() + epsilon)
        if mode == 1:
            update = update + weight_decay * weight
        weight = weight - lr * update
        for target in (parameter, *main):
            target.copy_(weight)


@kernel
def multi_tensor_adam_param_remainder(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """multi_tensor_adam with fp32 weights in two halves: the bf16 parameter, rounded by the highest bit of the lower
    half, and the lower half as int16 (AdamFunctorMasterParamRemainder in multi_tensor/adam.cu)."""
    gradients, parameters, first, second, remainders = tensor_lists
    halves = list(zip(parameters, remainders, strict=True))
    mains = [_joined(parameter, remainder) for parameter, remainder in halves]
    lists = [gradients, mains, first, second]
    multi_tensor_adam(
        chunk_size, noop_flag, lists, lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay
    )
    for main, (parameter, remainder) in zip(mains, halves, strict=True):
        upper, lower = main.view(torch.int16).view(-1, 2).unbind(1)[::-1]  # the lower half comes first in memory
        remainder.copy_(lower.view_as(remainder))
        parameter.view(torch.int16).copy_((upper + (lower < 0)).view_as(parameter))


def _joined(parameter: Tensor, remainder: Tensor) -> Tensor:
    upper = parameter.view(torch.int16) - (remainder < 0).to(torch.int16)
    return torch.stack([remainder, upper], dim=-1).view(torch.int32).view(torch.float32).view(parameter.shape)
