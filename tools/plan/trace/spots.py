"""Where the program looks at values, which fake tensors have not got: a closed list, patched in the traced process."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker


def install() -> None:
    """Of a process that traces and does nothing else."""
    from models import gpt
    from tools.plan.trace import balance

    torch.nn.Module.bfloat16 = _itself  # type: ignore[assignment]
    torch.nn.Module.half = _itself  # type: ignore[assignment]
    torch.nn.Module.to = _itself  # type: ignore[assignment]
    gpt.initialise = _nothing
    dist.all_gather_object = _own  # type: ignore[assignment]
    balance.install()
    CudaRNGStatesTracker.fork = _no_fork


def _itself(module: torch.nn.Module, *_args: Any, **_kwargs: Any) -> torch.nn.Module:
    """Weights are made in their type already; converting would swap fake tensors, which torch refuses."""
    return module


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """Initial weights have no size of their own."""


def _own(gathered: list[Any], mine: Any, group: Any = None) -> None:
    """Every rank would say what this one says."""
    for number in range(len(gathered)):
        gathered[number] = mine


def _no_fork(*_args: Any, **_kwargs: Any) -> AbstractContextManager[None]:
    """Random states are values; which they are does not matter."""
    return nullcontext()
