"""A hook: a mutant that quantizes layer 1's MLP in the forward pass by a scale that is far too large: it saturates."""

from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer

from tests.gpu_path.te import formats

SUBLAYER = 4
running: list[int] = []
forward, scale_from_amax = TransformerLayer.forward, formats.scale_from_amax


def named(self: Any, *args: Any, **kwargs: Any) -> Any:
    running.append(self.layer_number)
    try:
        return forward(self, *args, **kwargs)
    finally:
        running.pop()


def too_large(*args: Any, **kwargs: Any) -> Any:
    return scale_from_amax(*args, **kwargs) * (64 if running[-1:] == [SUBLAYER] else 1)


TransformerLayer.forward = named
formats.scale_from_amax = too_large
