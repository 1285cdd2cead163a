"""A hook: a mutant that quantizes layer 1's MLP in the forward pass by a scale that is far too large: it saturates. In
nvfp4, the scales of blocks."""

from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer

from tests.gpu_path.te import formats, nvfp4

SUBLAYER = 4
running: list[int] = []
forward, scale_from_amax = TransformerLayer.forward, formats.scale_from_amax
block_scales = nvfp4.block_scales


def named(self: Any, *args: Any, **kwargs: Any) -> Any:
    running.append(self.layer_number)
    try:
        return forward(self, *args, **kwargs)
    finally:
        running.pop()


def factor() -> int:
    return 64 if running[-1:] == [SUBLAYER] else 1


def too_large(*args: Any, **kwargs: Any) -> Any:
    return scale_from_amax(*args, **kwargs) * factor()


def smaller_blocks(amax: Any, encode: Any) -> Any:
    """What a block is divided by."""
    return block_scales(amax / factor(), encode)


TransformerLayer.forward = named
formats.scale_from_amax = too_large
nvfp4.block_scales = smaller_blocks
