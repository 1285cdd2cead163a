"""Which of Megatron's groups NCCL makes with a stream of high priority, and which with SHARP.

Each rank stands for a node; NCCL makes a group's communicator in its first collective, and reads SHARP's variable
there.
"""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from parallel import groups, launch
from parallel.config import ParallelConfig
from parallel.layout import Layout

first: dict[str, str] = {}
"""Group -> NCCL_COLLNET_ENABLE in its first collective."""


def noting(collective: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, group: Any = None, **kwargs: Any) -> Any:
        of: Any = dist.group.WORLD if group is None else group
        first.setdefault(of.group_desc, os.environ.get("NCCL_COLLNET_ENABLE", "unset"))
        return collective(*args, group=group, **kwargs)

    return call


dist.all_reduce, dist.barrier = noting(dist.all_reduce), noting(dist.barrier)
identity = launch.detect(os.environ)
assert identity is not None
os.environ["NCCL_COLLNET_ENABLE"] = "1"
alone = dataclasses.replace(identity, local_world_size=1)
asked = ParallelConfig(megatron=("high_priority_stream_groups=['dp_cp', 'tp_ep_pp']", "use_sharp=True"))
with groups.start(Layout(dp=2), alone, device="cuda", seed=1, parallel=asked) as ranks:
    of_names = {"dp_cp": ranks.pgs.dp_cp, "tp_ep_pp": ranks.pgs.tp_ep_pp, "dp": ranks.pgs.dp, "tp": ranks.pgs.tp}
    options = {name: group._get_backend(ranks.device).options for name, group in of_names.items()}
if identity.rank == 0:
    print("high priority:", *(name for name, option in options.items() if option.is_high_priority_stream))
    print("SHARP:", first)
