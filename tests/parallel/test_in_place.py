"""Data-parallel collectives in the buffers where weights and gradients are: bit by bit what torch's own give."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _coalescing_manager

from parallel import groups, mcore_patches
from parallel.launch import Identity
from parallel.layout import Layout
from ranks import run_ranks


def _check(identity: Identity, dtype: torch.dtype) -> None:
    size, rank = identity.world_size, identity.rank
    with groups.start(Layout(dp=size), identity, device="cpu", seed=1) as ranks:
        group = ranks.pgs.dp
        for length in (3, 1000, 100_003):
            whole = torch.randn(size * length, generator=torch.Generator().manual_seed(rank)).to(dtype)
            part = whole[rank * length : (rank + 1) * length]
            summed, gathered, apart = torch.empty_like(part), torch.empty_like(whole), torch.empty_like(part)
            dist.reduce_scatter_tensor(summed, whole.clone(), group=group)
            dist.all_gather_into_tensor(gathered, summed, group=group)
            mcore_patches.reduce_scatter_in_place(apart, whole.clone(), op=dist.ReduceOp.SUM, group=group)
            with _coalescing_manager(group, async_ops=True) as handle:  # as Megatron calls them
                mcore_patches.reduce_scatter_in_place(part, whole, op=dist.ReduceOp.SUM, group=group, async_op=True)
            handle.wait()
            assert torch.equal(part, summed) and torch.equal(apart, summed)
            whole[: rank * length], whole[(rank + 1) * length :] = 0, 0
            mcore_patches.all_gather_in_place(whole, part, group=group)
            assert torch.equal(whole, gathered)
            mcore_patches.all_gather_in_place(whole.zero_(), summed, group=group)
            assert torch.equal(whole, gathered)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_give_what_torchs_own_give(world_size: int, dtype: torch.dtype) -> None:
    run_ranks(world_size, _check, dtype)
