"""Gather and reduce-scatter of parts of different sizes, which gloo does not have.

Megatron's all-to-all dispatcher needs them where each expert's matrices are split (ETP > 1): every expert TP rank
brings another number of tokens.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather(local: Tensor, group: dist.ProcessGroup, sizes: Sequence[int]) -> Tensor:
    """[sizes[rank], ...] of each rank -> [sum(sizes), ...]. All are padded to the longest."""
    longest = max(sizes)
    padded = local.new_zeros((longest, *local.shape[1:]))
    padded[: local.shape[0]] = local
    gathered = local.new_empty((len(sizes) * longest, *local.shape[1:]))
    dist.all_gather_into_tensor(gathered, padded, group=group)
    parts = gathered.split(longest)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def reduce_scatter(whole: Tensor, group: dist.ProcessGroup, sizes: Sequence[int]) -> Tensor:
    """[sum(sizes), ...] of each rank -> the sum's [sizes[rank], ...]. Everything is reduced everywhere, then cut."""
    total = whole.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total.split(list(sizes))[group.rank()]


def where_uneven(mcore: Callable[..., Tensor], ours: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """mcore's function ``(tensor, group, sizes=None, use_global_buffer=False)``, ours where sizes are given and differ.

    ``sizes`` are the same on all ranks of the group, so all of them choose alike.
    """

    @functools.wraps(mcore)
    def call(tensor: Tensor, group: dist.ProcessGroup, sizes: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        if sizes is None or group.size() == 1:
            return mcore(tensor, group, sizes, *args, **kwargs)
        whole = [int(size) for size in sizes]
        if len(set(whole)) == 1:
            return mcore(tensor, group, None, *args, **kwargs)
        return ours(tensor, group, whole)

    return call
