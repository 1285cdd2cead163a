"""Where the program looks at values, which fake tensors have not got: a closed list, patched in the traced process."""

from contextlib import AbstractContextManager, nullcontext
from functools import partialmethod
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker


def install() -> None:
    """Of a process that traces and does nothing else."""
    from models import gpt
    from tools.plan.trace import balance

    torch.nn.Module.bfloat16 = partialmethod(_converted, torch.bfloat16)  # type: ignore[assignment]
    torch.nn.Module.half = partialmethod(_converted, torch.float16)  # type: ignore[assignment]
    torch.nn.Module.to = _itself  # type: ignore[assignment]
    gpt.initialise = _nothing
    dist.all_gather_object = _own  # type: ignore[assignment]
    balance.install()
    CudaRNGStatesTracker.fork = _no_fork


def _converted(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """New parameters with the old ones' marks: torch's own conversion would swap fake tensors, which it then refuses.

    mcore makes most weights in their type, but not learned positions: in fp32 they would make all that follows so.
    """
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for part in module.modules():
        for name, old in part._parameters.items():
            if old is None or not old.is_floating_point() or old.dtype == dtype:
                continue
            if old not in made:
                made[old] = torch.nn.Parameter(old.detach().to(dtype), requires_grad=old.requires_grad)
                made[old].__dict__.update(old.__dict__)
            part._parameters[name] = made[old]
    return module


def _itself(module: torch.nn.Module, *_args: Any, **_kwargs: Any) -> torch.nn.Module:
    """All is made on the CPU already."""
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
