"""A hook for a process that has not imported Megatron yet: what its jit_fuser, torch.compile, fuses on a GPU
(activations, biases with dropout and residual) counts as one launch of ``launch_meter``, not operator by operator, as
backward passes still do that Megatron leaves to autograd (of biases with dropout)."""

import functools
from collections.abc import Callable
from typing import Any

import torch

compile_of_torch = torch.compile
measured: list[Callable[[Callable[..., Any]], Callable[..., Any]]] = []
"""What launch_meter measures such a function with, once it is there."""


def compile_or_note(model: Any = None, **settings: Any) -> Any:
    """In place of torch.compile, which a decorator without settings calls by itself."""
    if model is None or settings:
        return compile_of_torch(model, **settings)

    @functools.wraps(model)
    def fused(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not measured:  # then it is a part of a larger graph
            return model(*args, **kwargs)
        return measured[0](model)(*args, **kwargs)

    return fused


torch.compile = compile_or_note
