"""Tensors without values or memory: what is made on the CPU is made on torch's "meta" device instead.

Rather than under ``FakeTensorMode``, which computes the same shapes and pretends to be on the CPU as well: a stage of
qwen3_30b_a3b with 16 experts a rank took 16.4 CPU s under it, and takes 2 here (62,782 operations; 2026-11-22, 2
virtual CPUs). tests/tools/plan/test_trace.py holds it to the bytes of real tensors.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

META = torch.device("meta")


class Meta(TorchDispatchMode):
    """Answers each operation as the CPU would: shapes, types and strides.

    What an operation returns follows from what its arguments look like, so that each is asked once for every look:
    torch works shapes out in Python, operation by operation, and a training step repeats itself.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled in a trace, and torch's guard against it takes a third of the time."""
        return False

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[Any, tuple[Look | None, ...] | None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return func(*tree_map_only(torch.Tensor, _stand_in, args), **kwargs)
        if func in AS_ON_CPU:
            return AS_ON_CPU[func](*args, **kwargs)
        if kwargs.get("device") is not None:
            kwargs = kwargs | {"device": META}
        key = _key(func, args, kwargs)
        if key is None:
            return func(*args, **kwargs)
        if key not in self._known:
            result = func(*args, **kwargs)
            self._known[key] = _looks(result, (args, kwargs))
            return result
        known = self._known[key]
        if known is None:
            return func(*args, **kwargs)
        return tuple(map(_made, known)) if len(func._schema.returns) > 1 else _made(known[0])


Look = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""What is to be known of a tensor without values: shape, stride, type."""


def _key(func: Any, args: Any, kwargs: Any) -> Any:
    """Operation and looks of all arguments; None where it writes into one, returns a view of one, or reads values."""
    if not _is_pure(func):
        return None
    try:
        key = func, _frozen(args), *map(_frozen, kwargs.items())
        hash(key)
    except (LookupError, TypeError):  # or something that is no key, such as a dict
        return None
    return key


@cache
def _is_pure(func: Any) -> bool:
    return not func._schema.is_mutable and all(one.alias_info is None for one in func._schema.returns)


def _frozen(value: Any) -> Any:
    """A part of a key: looks in place of tensors. The type goes with a number, since 1 == 1.0 == True. Raises
    LookupError for a tensor that has values."""
    if isinstance(value, torch.Tensor):
        if value.device != META:
            raise LookupError
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    return type(value), value


def _looks(result: Any, given: Any) -> tuple[Look | None, ...] | None:
    """Of what an operation returned; None where that cannot be made again from its looks: it is a view of an argument
    after all (``_unsafe_view``), is elsewhere, or no tensor."""
    parts = result if isinstance(result, tuple) else (result,)
    if not all(part is None or (isinstance(part, torch.Tensor) and part.device == META) for part in parts):
        return None
    storages = {leaf.untyped_storage()._cdata for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)}
    made = [part.untyped_storage()._cdata for part in parts if part is not None]
    if storages & set(made) or len(set(made)) < len(made):
        return None
    return tuple(None if part is None else (part.shape, part.stride(), part.dtype) for part in parts)


def _made(look: Look | None) -> torch.Tensor | None:
    return None if look is None else torch.empty_strided(look[0], look[1], dtype=look[2], device=META)


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
