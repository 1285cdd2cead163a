"""Activations with learned parameters (models/activations.py)."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn import functional


class XIELU(nn.Module):
    """xIELU (arXiv:2411.13010): a_p x^2 + b x above 0, a_n (expm1(x) - x) + b x below, with a_p = softplus(alpha_p) and
    a_n = b + softplus(alpha_n). Each TP rank sees a part of the channels: the gradients of both are summed over TP.

    transformers takes expm1 of min(x, -1e-6). Between that and 0 its derivative has the wrong sign, so that gradients
    depended on the rounding of single elements: with TP, by 1.4 % on one CPU and not on another. Its values differ from
    these by 2e-6 at most.
    """

    BETA = 0.5

    def __init__(self, config: TransformerConfig, group: Any) -> None:
        super().__init__()
        self.group = group
        self.alpha_p = nn.Parameter(torch.zeros(1, dtype=config.params_dtype))
        self.alpha_n = nn.Parameter(torch.zeros(1, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Element by element."""
        above, below = (
            copy_to_tensor_model_parallel_region(one, group=self.group) for one in (self.alpha_p, self.alpha_n)
        )
        return xielu(x, above, below, self.BETA)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """The same on all TP ranks."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            state, prefix, {}, sharded_offsets, tp_group=self.group, dp_cp_group=(metadata or {}).get("dp_cp_group")
        )


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: float) -> Tensor:
    """alpha_p, alpha_n: [1]."""
    above, below = functional.softplus(alpha_p), beta + functional.softplus(alpha_n)
    negative = x.clamp(max=0)  # for the other side of where: its gradient would be 0 times infinity
    return torch.where(x > 0, above * x * x, below * (torch.expm1(negative) - negative)) + beta * x


MODULES: dict[str, Callable[..., nn.Module]] = {"xielu": XIELU}
"""By the activation's name: ``(config, tensor-parallel group)``."""


class LearnedMLP(MLP):
    """mcore's MLP with a module as its activation."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.activation_func = MODULES[config.learned_activation](config, self.tp_group)
