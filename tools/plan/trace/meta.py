"""Tensors without values or memory: what is made on the CPU is made on torch's "meta" device instead.

Rather than under ``FakeTensorMode``, which computes the same shapes and pretends to be on the CPU as well: a stage of
qwen3_30b_a3b with 16 experts a rank took 16.4 CPU s under it, and takes 4.1 here (62,782 operations; 2026-11-22, 2
virtual CPUs). tests/tools/plan/test_trace.py holds it to the bytes of real tensors.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

META = torch.device("meta")


class Meta(TorchDispatchMode):
    """Answers each operation as the CPU would: shapes, types and strides."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return func(*tree_map_only(torch.Tensor, _stand_in, args), **kwargs)
        if func in AS_ON_CPU:
            return AS_ON_CPU[func](*args, **kwargs)
        if kwargs.get("device") is not None:
            kwargs = kwargs | {"device": META}
        return func(*args, **kwargs)


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """What the pretended group takes: a CPU tensor, whose rows it counts in order to check how they are split."""
    return torch.empty((*tensor.shape[:1], 0), dtype=tensor.dtype)


def _lifted(values: torch.Tensor) -> torch.Tensor:
    """``torch.tensor([...])``; one whole number stays where it is: mcore reads such back (attention.py:472)."""
    is_one = values.numel() == 1 and not values.is_floating_point()
    return values if is_one else values.to(META)


def _layer_norm(x: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The CPU keeps mean and inverse deviation in the type of its input; "meta" would keep them in fp32, as a card."""
    out, mean, inverse = torch.ops.aten.native_layer_norm.default(x, *args)
    return out, mean.to(x.dtype), inverse.to(x.dtype)


AS_ON_CPU: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.lift_fresh.default: _lifted,
    torch.ops.aten.native_layer_norm.default: _layer_norm,
}
