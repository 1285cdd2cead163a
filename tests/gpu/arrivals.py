"""What arrives from ranks that do not exist: values that a training goes on with, in place of whatever the memory held.

torch's fake group leaves received tensors as they were; of torch 2.11 also what is reduced and scattered, and what an
all-to-all brings. NaN in there would spread to everything, and matrix products of NaN or zeros draw less power than
real ones, so that a card's clock would tell another time. Here a message is normal noise, and a collective brings what
its own rank has given. Each costs one pass over what arrives, on the stream that computes: a few percent of a layer.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork


@contextlib.contextmanager
def filled() -> Iterator[None]:
    """For as long as all groups of this process are fake ones."""
    own = {name: getattr(dist.ProcessGroup, name) for name in ARRIVALS if hasattr(dist.ProcessGroup, name)}
    for name in own:
        setattr(dist.ProcessGroup, name, done(ARRIVALS[name]))
    try:
        yield
    finally:
        for name, method in own.items():
            setattr(dist.ProcessGroup, name, method)


def done(arrival: Callable[..., None]) -> Callable[..., FakeWork]:
    """As a method of a group: what it returns has ended, and can be waited for."""

    @functools.wraps(arrival)
    def method(*args: Any, **_: Any) -> FakeWork:
        with torch.no_grad():
            arrival(*args)
        return FakeWork()

    return method


def received(_group: dist.ProcessGroup, tensors: Sequence[Tensor], *_: Any) -> None:
    """Of noise whose deviation is 1, as what a norm would make of it."""
    for tensor in tensors:
        tensor.normal_()


def scattered(group: dist.ProcessGroup, output: Tensor, given: Tensor, *_: Any) -> None:
    """This rank's piece of its own sum."""
    output.copy_(given.view(group.size(), -1)[group.rank()].view_as(output))


def all_scattered(group: dist.ProcessGroup, outputs: Sequence[Tensor], given: Sequence[Tensor], *_: Any) -> None:
    """Of several tensors."""
    for output, own in zip(outputs, given, strict=True):
        scattered(group, output, own)


def exchanged(_group: dist.ProcessGroup, output: Tensor, given: Tensor, *_: Any) -> None:
    """As many rows as are expected, of those that were sent, over and over; zeros where none was."""
    if not len(given):
        output.zero_()
    rows = 0
    while rows < len(output) and len(given):
        count = min(len(given), len(output) - rows)
        output[rows : rows + count].copy_(given[:count])
        rows += count


ARRIVALS: dict[str, Callable[..., None]] = {
    "recv": received,
    "_reduce_scatter_base": scattered,
    "reduce_scatter_tensor_coalesced": all_scattered,
    "alltoall_base": exchanged,
    "reduce_scatter_single": scattered,
    "reduce_scatter_single_coalesced": all_scattered,
    "all_to_all_single": exchanged,
}
"""By the methods of a group that torch.distributed calls: torch 2.11's names, and those since 2.13."""
