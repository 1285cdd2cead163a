"""Where another rank runs; asked only when it must be named."""

import os

import torch.distributed as dist

from parallel.groups import Ranks
from parallel.launch import node_name


def host_of(rank: int, ranks: Ranks) -> str:
    """The node of ``rank``, see ``launch.node_name``, on every rank. Collective."""
    name = [node_name(os.environ) if rank == ranks.rank else None]
    dist.broadcast_object_list(name, src=rank, device=ranks.device)
    assert name[0] is not None
    return name[0]
