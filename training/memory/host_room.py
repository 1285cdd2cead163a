"""Whether each node's memory has room for what its ranks offload to it, and for CPU ranks as a whole."""

import os
from typing import NamedTuple

from models.costs.predict import SAFE_HOST_SHARE, of_stage, size
from models.shapes import GPTShape
from parallel.groups import Ranks
from parallel.launch import node_name
from program import host_memory
from program.errors import SharedMistake
from training.checkpoint.agreement import gathered
from training.config.run_config import RunConfig
from training.memory.measured import own_case
from training.memory.planned import too_little


class RankShare(NamedTuple):
    """Of one rank."""

    node: str
    offloaded: float
    """Bytes, predicted; of a CPU rank all that it holds."""
    total: float
    """Of its node's memory, or of the control group that it runs in; for a CPU rank, what of it is available."""


def check_host_room(config: RunConfig, shape: GPTShape, ranks: Ranks) -> None:
    """Before anything is built; one collective on CPUs, and where something is offloaded. Warns where it is more than
    is safe.

    Raises SharedMistake where a node has less memory than what its ranks offload takes, without anything else.
    """
    if ranks.device.type != "cpu" and not offloads(config):
        return
    own = of_stage(own_case(config, shape, ranks), shape, ranks.at.pp)
    if ranks.device.type == "cpu":
        share = RankShare(node_name(os.environ), own.tensors, host_memory.available_bytes())
        if found := lacking(gathered([share], ranks), 1.0):
            ranks.say(f"warning: {too_little(*found)}")
        return
    share = RankShare(node_name(os.environ), own.host, host_memory.total_bytes())
    if found := lacking(gathered([share], ranks)):
        node, needed, total = found
        text = (
            f"{node} has {size(total)} of memory, and its ranks are to offload {size(needed)} to it "
            f"({', '.join(offloads(config))})"
        )
        remedy = "Offload less, or use more nodes; --dry_run shows the bytes of a rank."
        if needed > total:
            raise SharedMistake(f"{text}. {remedy}")
        ranks.say(
            f"warning: {text}: more than {SAFE_HOST_SHARE:.0%}, which are safe. Torch rounds pinned tensors up to "
            f"powers of two; processes, data and checkpoints come on top. {remedy}"
        )


def offloads(config: RunConfig) -> list[str]:
    """The fields that offload what is predicted."""
    found = ["optimizer.optimizer_cpu_offload"] if config.optimizer.optimizer_cpu_offload else []
    found += ["train.cpu_offloading_num_layers"] if config.train.cpu_offloading_num_layers else []
    found += ["train.averages_on_host"] if config.train.averages_on_host else []
    return found + (["train.offload_modules"] if config.train.offload_modules else [])


def lacking(shares: list[RankShare], safe: float = SAFE_HOST_SHARE) -> RankShare | None:
    """The node with the least room of those with less than is safe: its name, all its ranks' bytes, its memory."""
    sums: dict[str, RankShare] = {}
    for share in shares:
        so_far = sums.get(share.node, share._replace(offloaded=0.0))
        total = min(so_far.total, share.total)
        sums[share.node] = RankShare(share.node, so_far.offloaded + share.offloaded, total)
    short = [each for each in sums.values() if each.offloaded > safe * each.total]
    return max(short, key=lambda each: each.offloaded / max(each.total, 1.0), default=None)
