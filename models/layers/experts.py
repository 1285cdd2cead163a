"""Experts with biases where Transformer Engine is not installed."""

from functools import partial
from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor


class ExpertOutput(RowParallelLinear):
    """The last linear layer of an expert, whose output mcore adds the weighted bias to in place (mlp.py:354).

    On one rank its output is that of a custom autograd function, unchanged, which torch forbids to be changed in
    place. Under sequence parallelism mcore marks the bias as one whose gradient is summed over TP, where each TP rank
    has other experts: each has all tokens of its own already.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.bias is not None:
            self.bias.sequence_parallel = False

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """[tokens, f / ETP] -> [tokens, h], and the bias."""
        output, bias = super().forward(input_)
        return (output if bias is None else output.clone()), bias


def sequential_experts() -> Any:
    """One expert after the other, of mcore's own linear layers."""
    return partial(SequentialMLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=ExpertOutput))
