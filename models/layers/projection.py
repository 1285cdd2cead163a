"""What Triplane changes of the linear layers that mcore builds a block from: their biases, norms behind them, and how
their output enters the residual stream."""

from collections.abc import Callable
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from torch import Tensor, nn

Builder = Callable[..., Any]
"""A class of linear layers, mcore's or Transformer Engine's, or what calls one."""


def with_bias(linear: Builder, bias: bool) -> Builder:
    """``linear`` with a bias of its own choice: mcore has one switch for a whole block."""

    def build(*args: Any, **kwargs: Any) -> Any:
        return linear(*args, **(kwargs | {"bias": bias}))

    return build


def with_post_norm(linear: type[nn.Module], norm: Builder) -> type[nn.Module]:
    """A row-parallel linear layer whose output, bias included, is normed; by Megatron-Bridge's name (post_layernorm).

    Under sequence parallelism the output is this rank's part of the tokens, as a norm's input elsewhere is.
    """

    class PostNormed(linear):  # type: ignore[misc,valid-type]
        def __init__(self, *args: Any, config: Any, **kwargs: Any) -> None:
            super().__init__(*args, config=config, **kwargs)
            self.post_layernorm = norm(
                config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )  # fmt: skip

        def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
            output, bias = super().forward(*args, **kwargs)
            return self.post_layernorm(output if bias is None else output + bias), None

    PostNormed.__name__ = PostNormed.__qualname__ = f"PostNormed{linear.__name__}"
    return PostNormed


def bias_dropout_add(multiplier: float) -> Builder:
    """mcore's, of ``multiplier`` times what a sublayer returns."""
    if multiplier == 1.0:
        return get_bias_dropout_add

    def build(training: bool, fused: bool) -> Builder:
        add = get_bias_dropout_add(training, fused)

        def scaled(output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            x, bias = output
            return add((x * multiplier, None if bias is None else bias * multiplier), residual, dropout)

        return scaled

    return build
