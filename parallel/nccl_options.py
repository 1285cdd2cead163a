"""Options of NCCL's that a recipe asks for: off by default, as no GPU has run them here."""

from collections.abc import MutableMapping
from pathlib import Path

from parallel.config import NCCL_FIELDS, ParallelConfig
from parallel.launch import Identity

SHARP_FIELD = "parallel.megatron: use_sharp"
SHARP = "NCCL_COLLNET_ENABLE"


def nccl_problems(parallel: ParallelConfig, cuda: bool) -> list[str]:
    """Those that are asked for without a GPU, where collectives are gloo's."""
    asked = [name for name in NCCL_FIELDS if getattr(parallel, name)]
    return [] if cuda else [f"parallel.megatron: {name} cannot be: it needs GPUs. Leave it out." for name in asked]


def sharp_problems(parallel: ParallelConfig, identity: Identity, sharp: str) -> list[str]:
    """Why SHARP cannot be here. sharp: what the environment had of its variable."""
    if not parallel.use_sharp:
        return []
    if identity.local_world_size == identity.world_size:
        return [f"{SHARP_FIELD} cannot be: SHARP is of the switches between nodes, and all ranks are on one node."]
    if sharp != "1":
        return [
            f"{SHARP_FIELD} cannot be: {SHARP} is {sharp}, expected 1. Set it in [env] of the cluster file "
            "(slurm/clusters) where NCCL's SHARP plugin and the fabric's aggregation manager are; else leave it out."
        ]
    return []


def allocator_problems(parallel: ParallelConfig, cuda_home: str | None) -> list[str]:
    """Why NCCL's allocator cannot be compiled on this node. cuda_home: torch.utils.cpp_extension's."""
    header = Path(cuda_home or "/usr/local/cuda", "include", "cuda_runtime.h")
    if not parallel.nccl_ub or header.is_file():
        return []
    return [
        f"parallel.megatron: nccl_ub cannot be: megatron-core compiles NCCL's allocator, and this node has no "
        f"{header}. Set CUDA_HOME to a CUDA toolkit, or leave it out."
    ]


def take_sharp(environ: MutableMapping[str, str]) -> str:
    """Its variable, which the environment then has no more, or "unset".

    SHARP is for the first communicator that is made with it. That would be the one of all ranks, which sums nothing
    large; megatron-core sets the variable for DP x CP alone.
    """
    return environ.pop(SHARP, "unset")
