"""Blocks whose attention and MLP read the same residual stream: x + attention(norm_1(x)) + MLP(norm_2(x))."""

import itertools
from collections.abc import Iterator
from typing import Any

from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn


class BlockInput:
    """What a block's attention has read, for its MLP. Both are of one pipeline chunk, and of one unit of recomputation
    (models/sublayers.py)."""

    def __init__(self) -> None:
        self.stream: Tensor | None = None


class ParallelAttentionLayer(TransformerLayer):
    """Keeps what it reads."""

    block_input: BlockInput

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.block_input.stream = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        return super().forward(*args, **kwargs)


class ParallelMLPLayer(MLPLayer):
    """Reads what attention has read, and adds to what attention has returned."""

    block_input: BlockInput

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        stream, self.block_input.stream = self.block_input.stream, None
        self.attention_output = hidden_states
        try:
            return super().forward(stream, *args, **kwargs)
        finally:
            del self.attention_output

    def _forward_post_mlp(self, mlp_output_with_bias: Any, residual: Tensor) -> Tensor:
        return super()._forward_post_mlp(mlp_output_with_bias, self.attention_output)


def join(layers: nn.ModuleList) -> None:
    """Let each MLP of a chunk know what the attention before it reads."""
    for attention, mlp in _pairs(layers):
        attention.block_input = mlp.block_input = BlockInput()


def _pairs(layers: nn.ModuleList) -> Iterator[tuple[ParallelAttentionLayer, ParallelMLPLayer]]:
    for before, layer in itertools.pairwise(layers):
        if isinstance(layer, ParallelMLPLayer):
            assert isinstance(before, ParallelAttentionLayer), f"an MLP behind {type(before).__name__}"
            yield before, layer
