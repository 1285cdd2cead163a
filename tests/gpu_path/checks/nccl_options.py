"""Which of Megatron's groups NCCL makes with a stream of high priority."""

import os

from parallel import groups, launch
from parallel.config import ParallelConfig
from parallel.layout import Layout

identity = launch.detect(os.environ)
assert identity is not None
asked = ParallelConfig(high_priority_stream_groups=("dp_cp", "tp_ep_pp"))
with groups.start(Layout(dp=2), identity, device="cuda", seed=1, timeout_minutes=1, nccl=asked) as ranks:
    of_names = {"dp_cp": ranks.pgs.dp_cp, "tp_ep_pp": ranks.pgs.tp_ep_pp, "dp": ranks.pgs.dp, "tp": ranks.pgs.tp}
    options = {name: group._get_backend(ranks.device).options for name, group in of_names.items()}
if identity.rank == 0:
    print("high priority:", *(name for name, option in options.items() if option.is_high_priority_stream))
