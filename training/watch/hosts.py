"""Where another rank runs; asked only when it must be named."""

import socket

import torch.distributed as dist

from parallel.groups import Ranks


def host_of(rank: int, ranks: Ranks) -> str:
    """The host name of ``rank``, on every rank. Collective."""
    told = [socket.gethostname() if rank == ranks.rank else None]
    dist.broadcast_object_list(told, src=rank, device=ranks.device)
    assert told[0] is not None
    return told[0]
