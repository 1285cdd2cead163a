"""Activations with learned parameters (models/activations.py)."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from models.layers.whole_matrices import SplitOverTP


class XIELU(SplitOverTP):
    """xIELU (arXiv:2411.13010): a_p x^2 + b x above 0, a_n (expm1(x) - x) + b x below, with a_p = softplus(alpha_p) and
    a_n = b + softplus(alpha_n). Each TP rank sees a part of the channels: the gradients of both are summed over TP.

    transformers takes expm1(min(x, -1e-6)) below 0, by which the derivative jumps by a_n there: one element of
    apertus_tiny, at -9.9e-7 on one rank and at -1.02e-6 on two, was 1.4 % of a gradient. Here it is continuous, and the
    value another by 1e-6 a_n at most."""

    BETA = 0.5

    def __init__(self, config: TransformerConfig, group: Any) -> None:
        super().__init__()
        self.tp_group = group
        self.alpha_p = nn.Parameter(torch.zeros(1, dtype=config.params_dtype))
        self.alpha_n = nn.Parameter(torch.zeros(1, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Element by element."""
        both = (copy_to_tensor_model_parallel_region(one, group=self.tp_group) for one in (self.alpha_p, self.alpha_n))
        above, below = (functional.softplus(one) for one in both)
        out: Tensor = _Recomputed.apply(x, above, self.BETA + below)
        return out


class _Recomputed(torch.autograd.Function):
    """xIELU of x, a_p and a_n, whose backward pass makes it again: autograd would keep five tensors of x's shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, above: Tensor, below: Tensor) -> Tensor:
        ctx.save_for_backward(x, above, below)
        return _xielu(x, above, below)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
            return torch.autograd.grad(_xielu(*inputs), inputs, grad)


def _xielu(x: Tensor, above: Tensor, below: Tensor) -> Tensor:
    negative = torch.expm1(x.clamp(max=0)) - x  # nothing overflows above 0, whose gradient would be 0 times inf
    return torch.where(x > 0, above * x * x + XIELU.BETA * x, negative * below + XIELU.BETA * x)


MODULES: dict[str, Callable[..., nn.Module]] = {"xielu": XIELU}
"""By the activation's name: ``(config, tensor-parallel group)``."""


class LearnedMLP(MLP):
    """mcore's MLP with a module as its activation."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.activation_func = MODULES[config.learned_activation](config, self.tp_group)
