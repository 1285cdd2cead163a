"""gloo's gather and reduce-scatter of parts of different sizes, against their definition."""

import pytest
import torch
import torch.distributed as dist

from parallel.cpu import uneven
from parallel.launch import Identity
from parallel.layout import Layout
from ranks import run_ranks


def brought(rank: int, sizes: list[int]) -> torch.Tensor:
    """What a rank brings: [sum(sizes), 2], other numbers on each."""
    return torch.arange(2.0 * sum(sizes)).view(-1, 2) + 1000 * rank


def _uneven(identity: Identity, sizes: list[int]) -> None:
    from megatron.core.tensor_parallel import mappings

    from parallel import groups

    everyone = range(len(sizes))
    expected = torch.cat([brought(rank, sizes).split(sizes)[rank] for rank in everyone])
    total = torch.stack([brought(rank, sizes) for rank in everyone]).sum(dim=0).split(sizes)[identity.rank]
    with groups.start(Layout(tp=len(sizes)), identity, device="cpu", seed=1) as ranks:
        mine = brought(identity.rank, sizes).split(sizes)[identity.rank]
        assert torch.equal(uneven.gather(mine, ranks.pgs.tp, sizes), expected)
        assert torch.equal(uneven.reduce_scatter(brought(identity.rank, sizes), ranks.pgs.tp, sizes), total)
        # mcore's own functions, as its dispatcher calls them, forward and backward
        leaf = mine.clone().requires_grad_()
        gathered = mappings.gather_from_sequence_parallel_region(leaf, group=ranks.pgs.tp, output_split_sizes=sizes)
        assert torch.equal(gathered, expected)
        (gathered * brought(identity.rank, sizes)).sum().backward()
        assert torch.equal(leaf.grad, total)
        dist.barrier()


@pytest.mark.parametrize("sizes", [[3, 1, 2], [0, 4], [2, 2]])
def test_parts_of_different_sizes_are_gathered_and_reduced(sizes: list[int]) -> None:
    """Also where a rank brings nothing: an expert's rank that no token chose."""
    run_ranks(len(sizes), _uneven, sizes)
