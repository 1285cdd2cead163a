"""Experts one after the other, with biases: of mcore's own linear layers or of Transformer Engine's."""

from functools import partial
from typing import Any

from megatron.core.models.backends import BackendSpecProvider
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn


def expert_output(linear: type[nn.Module]) -> type[nn.Module]:
    """A row-parallel linear layer as the last of an expert, whose output mcore adds the weighted bias to in place
    (mlp.py:354).

    That output is of a custom autograd function: a view in Transformer Engine's, on one rank the input itself in
    mcore's. torch forbids to change either in place, so it is copied where there is a bias. Under sequence parallelism
    mcore marks the bias as one whose gradient is summed over TP, where each TP rank has other experts, or all tokens of
    its own already.
    """

    class ExpertOutput(linear):  # type: ignore[misc,valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if self.bias is not None:  # Transformer Engine has an empty tensor for none
                self.bias.sequence_parallel = False

        def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
            """[tokens, f / ETP] -> [tokens, h], and the bias."""
            output, bias = super().forward(*args, **kwargs)
            return (output if bias is None else output.clone()), bias

    ExpertOutput.__name__ = ExpertOutput.__qualname__ = f"Expert{linear.__name__}"
    return ExpertOutput


def sequential_experts(backend: BackendSpecProvider) -> Any:
    """One expert after the other, of the backend's linear layers."""
    linears = MLPSubmodules(
        linear_fc1=backend.column_parallel_linear(),
        linear_fc2=expert_output(backend.row_parallel_linear()),
        activation_func=backend.activation_func(),
    )
    return partial(SequentialMLP, submodules=linears)
