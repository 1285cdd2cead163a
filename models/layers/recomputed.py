"""Sublayers that the backward pass computes again from their own input: those that train.recompute "auto" chooses.

Megatron's recompute_modules are the same of every block, and its "block" method takes the first ones; here it is any
set. As there, by megatron-core's checkpoint, or Transformer Engine's where products are in fp8 or fp4: dropout draws
again what it drew.
"""

from collections.abc import Collection
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import Tensor, nn


def install(chunk: HybridModel, numbers: Collection[int]) -> None:
    """For these sublayers of a chunk's stack, counted as HybridModel counts them."""
    for number in numbers:
        layer = chunk.decoder.layers[number]
        layer.forward = RecomputedForward(layer)  # no submodule: no key of a state dict


class RecomputedForward:
    """A layer's ``forward``, which keeps ``hidden_states`` alone where it is trained. Its other arguments have no
    gradients."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        layer: Any = self.layer

        def forward(hidden: Tensor) -> Any:
            return type(layer).forward(layer, hidden, *args, **kwargs)

        if not (layer.training and torch.is_grad_enabled()):
            return forward(hidden_states)
        if layer.config.fp8 or layer.config.fp4:
            from megatron.core.extensions.transformer_engine import te_checkpoint

            tracker = tensor_parallel.random.get_cuda_rng_tracker
            return te_checkpoint(forward, False, tracker, layer.tp_group, hidden_states)
        return tensor_parallel.checkpoint(forward, False, hidden_states)
