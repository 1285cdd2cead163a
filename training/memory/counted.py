"""Bytes of the tensors that a rank really holds between two steps."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from parallel.replicas import Chunks


class Counted(NamedTuple):
    """Bytes of one rank."""

    weights: int
    gradients: int
    """The buffers of DDP, padding included."""
    optimizer: int
    """Main weights that are not the weights themselves, and the moments."""

    @property
    def total(self) -> int:
        return sum(self)


def counted(chunks: Chunks, optimizer: MegatronOptimizer) -> Counted:
    """From the tensors themselves; views of one storage count once, and as what they are first in this order."""
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    gathered = [buffer.param_data for buffer in buffers if buffer.param_data is not None]
    seen = {_storage(tensor) for tensor in (*parameters, *gathered)}
    gradients = _fresh((buffer.grad_data for buffer in buffers), seen)
    return Counted(
        weights=sum(parameter.nbytes for parameter in parameters),
        gradients=gradients,
        optimizer=_fresh(_optimizer_tensors(optimizer), seen),
    )


def _fresh(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Bytes of the storages that have not been seen yet."""
    found = 0
    for tensor in tensors:
        key = _storage(tensor)
        if key not in seen:
            seen.add(key)
            found += tensor.untyped_storage().nbytes()
    return found


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _optimizer_tensors(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Main weights and state of every optimizer in the chain; those on a rank without parameters have none."""
    chained: list[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
    for one in chained:
        inner = getattr(one, "optimizer", None)
        if inner is None:
            continue
        for group in inner.param_groups:
            yield from group["params"]
        for state in inner.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
