"""Start and stop torch.distributed and Megatron's groups. The only user of ``megatron.core.parallel_state``."""

import contextlib
import hashlib
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from parallel.cpu import adam, cuda_redirect, mcore_spots
from parallel.errors import SharedMistake
from parallel.launch import Identity
from parallel.layout import Coordinates, Layout


@dataclass(kw_only=True, slots=True, frozen=True)
class Ranks:
    """This rank, its place on the grid, and its groups."""

    identity: Identity
    layout: Layout
    at: Coordinates
    device: torch.device
    pgs: ProcessGroupCollection
    console_fd: int | None

    @property
    def rank(self) -> int:
        return self.identity.rank

    @property
    def is_first_stage(self) -> bool:
        return self.at.pp == 0

    @property
    def is_last_stage(self) -> bool:
        return self.at.pp == self.layout.pp - 1

    def say(self, text: str) -> None:
        """One line on the console, from rank 0 only; library noise never gets there."""
        if self.console_fd is not None:
            os.write(self.console_fd, (text + "\n").encode())


@contextlib.contextmanager
def start(
    layout: Layout,
    identity: Identity,
    *,
    device: Literal["cpu", "cuda"],
    seed: int,
    timeout_minutes: float,
    console_fd: int | None = None,
) -> Iterator[Ranks]:
    """Join all ranks, build Megatron's groups and seed its RNG tracker; leave them again at the end.

    On the CPU this installs the CPU backend in this process.
    """
    on = _prepare_device(device, identity)
    timeout = timedelta(minutes=timeout_minutes)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(
        backend, rank=identity.rank, world_size=identity.world_size, timeout=timeout, store=_store(identity, timeout),
        device_id=on if device == "cuda" else None,
    )  # fmt: skip
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        distributed_timeout_minutes=timeout_minutes,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(seed)
    pgs = ProcessGroupCollection.use_mpu_process_groups()
    try:
        yield Ranks(
            identity=identity,
            layout=layout,
            at=layout.coordinates(identity.rank),
            device=on,
            pgs=pgs,
            console_fd=console_fd,
        )
        # A rank that left early would abort its peers' gloo threads: all leave together.
        dist.barrier()
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _prepare_device(device: Literal["cpu", "cuda"], identity: Identity) -> torch.device:
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // identity.local_world_size))
    mcore_spots.check()
    adam.install()
    if device == "cpu":
        cuda_redirect.install()
        mcore_spots.install()
        return torch.device("cpu")
    # Several ranks may share one GPU (NCCL >= 2.30 with NCCL_MULTI_RANK_GPU_ENABLE=1); else local_rank is its number.
    index = identity.local_rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _store(identity: Identity, timeout: timedelta) -> dist.Store | None:
    """Local ranks meet at a socket that their parent has bound already, so no other program can take the port.

    None: torch's ``env://``, which torchrun and srun describe.
    """
    if identity.launcher in ("torchrun", "srun"):
        return None
    if identity.launcher == "single":
        return dist.HashStore()
    return dist.TCPStore(
        "127.0.0.1", identity.port or 0, identity.world_size, is_master=identity.rank == 0, timeout=timeout,
        master_listen_fd=identity.listen_fd, wait_for_workers=False,
    )  # fmt: skip


def same_everywhere(facts: Mapping[str, str], ranks: Ranks) -> None:
    """Raises SharedMistake on every rank, naming a rank that differs, unless all ranks hold the same ``facts``.

    Costs two reductions of eight numbers per fact; details travel only when something differs.
    """
    hashes = [
        struct.unpack("<q", hashlib.blake2b(f"{key}={value}".encode(), digest_size=8).digest())[0]
        for key, value in facts.items()
    ]
    lowest, highest = (torch.tensor(hashes, dtype=torch.int64, device=ranks.device) for _ in range(2))
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    differing = [
        index for index, (low, high) in enumerate(zip(lowest.tolist(), highest.tolist(), strict=True)) if low != high
    ]
    if not differing:
        return
    key = list(facts)[differing[0]]
    mine = [f"rank {ranks.rank} ({os.uname().nodename}): {facts[key]}"]
    all_values: list[list[str]] = [[] for _ in range(ranks.identity.world_size)]
    dist.all_gather_object(all_values, mine)
    values = [value for each in all_values for value in each]
    common = values[0].split(": ", 1)[1]
    other = next(value for value in values if value.split(": ", 1)[1] != common)
    raise SharedMistake(
        f"ranks do not agree on {key}: {values[0]}, but {other}. All ranks must run the same code and configuration."
    )
