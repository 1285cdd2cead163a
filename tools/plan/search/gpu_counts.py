"""How many GPUs: the numbers that a cluster comes in, and whether a model fits on one of them."""

import dataclasses
from collections.abc import Iterator

from models.costs.parameters import num_parameters
from models.costs.predict import SAFE_HOST_SHARE, SAFE_SHARE
from tools.clusters import Cluster
from tools.plan.cost.hardware import host_share, precisions
from tools.plan.search.enumeration import candidates
from tools.plan.search.pricing import price
from tools.plan.search.request import PlanRequest

LARGEST = 65536
"""GPUs beyond which no cluster is offered."""
EVERY_NODE = 256
"""Nodes up to which every whole number of them is tried."""
TRIED = (
    f"parts of a node, every whole number of nodes up to {EVERY_NODE}, beyond that eight numbers of nodes between one "
    "power of two and the next"
)
STATE_BYTES = 16
"""Of weights, gradients and optimizer, a parameter, at the least: fp32's, and those of shards; others have 18."""


def gpu_counts(cluster: Cluster) -> Iterator[int]:
    """``TRIED``, up to ``LARGEST``."""
    node = cluster.node.gpus_per_node
    yield from (count for count in range(1, node) if node % count == 0)
    nodes = 1
    while nodes * node <= LARGEST:
        yield nodes * node
        nodes += 1 if nodes < EVERY_NODE else 2 ** (nodes.bit_length() - 4)


def fewest(question: PlanRequest) -> int | None:
    """GPUs on which some layout fits; none of fewer GPUs does, of those with room for ``STATE_BYTES``: on the card, and
    where the optimizer is offloaded in their share of the node's memory."""
    room = SAFE_SHARE * question.cluster.gpu.memory_gib * 2**30
    if question.optimizer.optimizer_cpu_offload:
        room += SAFE_HOST_SHARE * host_share(question.cluster)
    least = STATE_BYTES * num_parameters(question.shape) / room
    counts = (count for count in gpu_counts(question.cluster) if count >= least)
    return next((count for count in counts if fits(dataclasses.replace(question, num_gpus=count))), None)


def fits(question: PlanRequest) -> bool:
    """Whether some layout does. Asked of the leanest, which hold no more than others of their sizes: micro-batches of
    one, full recomputation (of activations on the host a GPU holds as much), one chunk a stage, one copy of shards,
    16-bit weights alone."""
    leanest: dict[str, int | str] = {
        "mbs": 1, "vpp": 1, "recompute": "full", "copies": 1, "precision": precisions(question.cluster)[0],
    }  # fmt: skip
    lean = dataclasses.replace(question, fixed=leanest | question.fixed)
    return any(plan.fits for plan in price(lean, candidates(lean), keep=1))
