"""An error for want of memory ends with what takes most, and with what would hold less."""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from models.costs.predict import size
from models.shapes import GPTShape
from parallel.groups import Ranks
from program import host_memory
from training.config.run_config import RunConfig
from training.memory.measured import modules_of
from training.memory.oom_advice import Room, advice

MARKS = (
    "out of memory",  # CUDA's own, cuBLAS' and NCCL's words for it, where torch's allocator was not asked
    "CUBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator",  # can't allocate memory, not enough memory
)
OF_THE_HOST = (
    "out of the host's memory: {} are left of {} on this node. On it lie what optimizer.optimizer_cpu_offload, "
    "train.cpu_offloading_num_layers and train.offload_modules take from a GPU, and "
    "checkpoint.async_save's copies. Offload less, set checkpoint.async_save = false, or use more nodes."
)


@contextlib.contextmanager
def explain_out_of_memory(config: RunConfig, shape: GPTShape, ranks: Ranks, recipe: Path) -> Iterator[None]:
    """Around building and training: gives an error for want of memory a note (PEP 678), and lets it pass.

    Every rank that fails has the note; of all ranks' failures one is shown (``RankMonitor.settle``). recipe: the run's
    own, once it is written.
    """
    room = own_room(ranks)
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            with contextlib.suppress(Exception):  # whatever happens here must not hide the error itself
                if ranks.device.type == "cuda" and is_of_the_host(error):
                    note = of_the_host()
                else:
                    known = f"{recipe}" if recipe.exists() else "RECIPE"
                    note = advice(config, ranks.layout.world_size, shape, modules_of(ranks), room, known)
                error.add_note(note)
        raise


def is_out_of_memory(error: BaseException) -> bool:
    """Of a GPU, or of the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in MARKS)


def is_of_the_host(error: BaseException) -> bool:
    """Of what ``is_out_of_memory`` finds."""
    return isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)


def of_the_host() -> str:
    """In place of advice about a card, whose memory was not the one that ran out."""
    return OF_THE_HOST.format(size(host_memory.available_bytes()), size(host_memory.total_bytes()))


def own_room(ranks: Ranks) -> Room:
    """What this rank can have: its card, or its share of what the host, a container or a limit of its own leaves."""
    if ranks.device.type == "cuda":
        host = host_memory.total_bytes() / ranks.identity.local_world_size
        card = torch.cuda.get_device_properties(ranks.device).total_memory
        return Room(bytes=card, words="the card's {}", host_bytes=host)
    own = psutil.Process().memory_info()
    share = host_memory.total_bytes() / ranks.identity.local_world_size - own.rss
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit - own.vms < share:
        return Room(bytes=limit - own.vms, words="the {} that this process' limit (ulimit -v) leaves")
    return Room(bytes=share, words="the {} of this host that a rank can have")
