"""Variables that CUDA and torch's allocator read once, when they start: set before that, on every rank."""

import subprocess
from collections.abc import Mapping, MutableMapping

from parallel.config import ParallelConfig

BLACKWELL = 10.0
"""Compute capability from which on the order of launches needs no single connection."""
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "NCCL_ALGO": "^NVLS",
}
LIMIT_S = 20.0


def prepare(
    environ: MutableMapping[str, str],
    parallel: ParallelConfig,
    graphs: bool = False,
    deterministic: bool = False,
    offloading: bool = False,
) -> None:
    """Set what ``variables`` says. Nothing where no driver answers: expandable segments are its virtual memory."""
    capability = lowest_capability(environ)
    if capability is not None:
        environ.update(variables(environ, parallel, capability, graphs, deterministic, offloading))


def variables(
    environ: Mapping[str, str],
    parallel: ParallelConfig,
    capability: float,
    graphs: bool = False,
    deterministic: bool = False,
    offloading: bool = False,
) -> dict[str, str]:
    """What is best for this layout on cards of this compute capability, but for what the user has set.

    With one connection kernels start in the order of their launches, so that a collective of TP or CP gets its turn
    before the product that hides it (Megatron's rule; Blackwell needs it no more). It would hold up gathers of shards:
    Megatron refuses both together. Expandable segments grow in place of being fragmented; beside the pool that nccl_ub
    registers with NCCL they are not tried. graphs: layers run as CUDA graphs, whose buffers NCCL must not register
    where segments expand: illegal accesses (Megatron's rule). deterministic: what Megatron's --deterministic-mode asks
    for: fixed workspaces of cuBLAS, deterministic kernels of Transformer Engine, no sums in NVLink's switches.
    offloading: Transformer Engine must tell weights from activations as megatron-core expects (Megatron's rule).
    """
    found = {}
    exchanges = parallel.tensor_model_parallel_size > 1 or parallel.context_parallel_size > 1
    if (
        exchanges
        and not parallel.fully_sharded
        and capability < BLACKWELL
        and "CUDA_DEVICE_MAX_CONNECTIONS" not in environ
    ):
        found["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if not parallel.nccl_ub and not any(name in environ for name in ALLOCATOR):
        found["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if graphs and "NCCL_GRAPH_REGISTER" not in environ:
        found["NCCL_GRAPH_REGISTER"] = "0"
    if offloading and "NVTE_CPU_OFFLOAD_V1" not in environ:
        found["NVTE_CPU_OFFLOAD_V1"] = "1"
    if deterministic:
        found |= {name: value for name, value in DETERMINISTIC.items() if name not in environ}
    return found


def lowest_capability(environ: Mapping[str, str]) -> float | None:
    """Compute capability of this node's weakest card, as nvidia-smi has it; None where it does not answer.

    Not torch's: asking it starts CUDA.
    """
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=dict(environ))
        return min(map(float, done.stdout.split()), default=None)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
