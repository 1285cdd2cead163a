"""Checksums of tensors' bits, on their device: two int64 numbers, without waiting for them."""

from collections.abc import Iterable

import torch
from torch import Tensor

COLUMNS = 256
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """int64 [2]: the sum of the elements' bits, and the same weighted by position modulo COLUMNS; both modulo 2^64.

    One element more or less by any bit changes the first; elements of other columns that changed places, the second.
    Costs one pass over the memory. Any dtype of 1 to 8 bytes, contiguous.
    """
    bits = tensor.detach().view(-1).view(INTEGERS[tensor.element_size()])
    whole = bits.numel() // COLUMNS * COLUMNS
    columns = bits[:whole].view(-1, COLUMNS).sum(0, dtype=torch.int64)
    rest = bits[whole:]
    columns[: rest.numel()] += rest
    weights = torch.arange(1, 2 * COLUMNS, 2, dtype=torch.int64, device=bits.device)
    return torch.stack([columns.sum(), (columns * weights).sum()])


def combined(checksums: Iterable[Tensor]) -> Tensor:
    """One checksum of several, int64 [2]: each weighted by its place among them."""
    stacked = torch.stack(list(checksums))
    weights = torch.arange(1, 2 * len(stacked), 2, dtype=torch.int64, device=stacked.device)
    return (stacked * weights[:, None]).sum(0)
