"""Start and stop torch.distributed and Megatron's groups. The only user of ``megatron.core.parallel_state``."""

import contextlib
import functools
import hashlib
import os
import random
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch.utils import cpp_extension

from parallel import mcore_patches
from parallel.config import ParallelConfig
from parallel.cpu import adam, cuda_redirect, eager
from parallel.launch import STAGE, Identity, await_master, node_name
from parallel.layout import Coordinates, Layout
from parallel.nccl_options import allocator_problems, nccl_problems, sharp_problems, take_sharp
from program.errors import SharedFault, SharedMistake, UserError, printable
from program.processes import schedule_as_batch


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
        """One line on the console, from rank 0 only; library noise never gets there.

        A console that takes no more (a file on a full disk, a closed pipe) ends no training: metrics.jsonl has it all.
        """
        if self.console_fd is not None:
            with contextlib.suppress(OSError):
                os.write(self.console_fd, (self._clear() + printable(text) + "\n").encode())

    def show_progress(self, text: str) -> None:
        """A line that the next one replaces, where the console is a terminal; nothing elsewhere."""
        if self.console_fd is not None and os.isatty(self.console_fd):
            with contextlib.suppress(OSError):
                os.write(self.console_fd, (self._clear() + text).encode())

    def _clear(self) -> str:
        return "\r\x1b[K" if self.console_fd is not None and os.isatty(self.console_fd) else ""


@dataclass(kw_only=True, slots=True, frozen=True)
class Meeting:
    """What ranks must agree on before they work together, and how long one waits for another."""

    timeout_minutes: float = 5.0
    """Of a collective."""
    resolve_s: float = 60.0
    """Seconds that MASTER_ADDR may take to resolve."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """The same on all ranks, see ``same_everywhere``; compared before any group is built, since ranks with different
    layouts would wait for each other."""


@contextlib.contextmanager
def start(
    layout: Layout,
    identity: Identity,
    *,
    device: Literal["cpu", "cuda"],
    seed: int,
    meeting: Meeting | None = None,
    parallel: ParallelConfig | None = None,
    graphs: bool = False,
    console_fd: int | None = None,
) -> Iterator[Ranks]:
    """Join all ranks, build Megatron's groups and seed its RNG tracker; leave them again at the end.

    parallel: HSDP's copies, and NCCL's options for the groups; None: defaults. graphs: random states that CUDA graphs
    can replay. On the CPU this installs the CPU backend in this process. Raises SharedMistake for facts that differ and
    for options that cannot be, UserError where MASTER_ADDR does not resolve in time, SharedFault where MASTER_PORT is
    taken.
    """
    meeting, parallel, sharp = meeting or Meeting(), parallel or ParallelConfig(), take_sharp(os.environ)
    on = _prepare_device(device, identity)
    timeout = timedelta(minutes=meeting.timeout_minutes)
    # No device_id: bound to a device, torch would make every later group a split of this one on all ranks, members or
    # not, and mcore builds thousands of groups at 1,024 ranks.
    store = _store(identity, timeout, meeting.resolve_s)
    try:
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            rank=identity.rank,
            world_size=identity.world_size,
            timeout=timeout,
            store=store,
        )
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise SharedFault(  # and no mistake: slurm/pretrain.sbatch starts again, with the next port if none was given
            f"MASTER_PORT {os.environ['MASTER_PORT']}, where the ranks meet, is in use on {node_name(os.environ)}: by "
            "another job, or by one that has not ended yet. Set another MASTER_PORT, the same on all ranks.",
            identity.rank,
        ) from None
    try:
        of_nccl = {"NCCL_COLLNET_ENABLE": sharp} if device == "cuda" else {}
        same_everywhere({**meeting.facts, **of_nccl}, identity, on)
        if problems := nccl_problems(parallel, on.type == "cuda") or sharp_problems(parallel, identity, sharp):
            raise SharedMistake("\n".join(problems))
        if problems := allocator_problems(parallel, cpp_extension.CUDA_HOME):
            raise UserError(problems[0])
        yield _join(layout, identity, on, seed, meeting.timeout_minutes, console_fd, parallel, graphs)
        _leave_together(identity)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@contextlib.contextmanager
def pretend(
    layout: Layout,
    identity: Identity,
    *,
    device: Literal["cpu", "cuda"] = "cpu",
    parallel: ParallelConfig | None = None,
    graphs: bool = False,
) -> Iterator[Ranks]:
    """One rank of a job whose other ranks do not exist: collectives return at once, with whatever was in the buffer.

    For counting what a rank holds and sends (tools.plan trace), on a CPU or with "meta" tensors, and for what one
    card measures of a rank of many (tests/gpu/pretended.py). parallel and graphs: as ``start`` takes them.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.Backend.backend_capability["fake"] = ["cpu", "meta", "cuda"]
    on = _prepare_device(device, identity)
    dist.init_process_group("fake", rank=identity.rank, world_size=identity.world_size, store=FakeStore())
    try:
        yield _join(
            layout, identity, on, 1, timeout_minutes=1.0, console_fd=None, parallel=parallel or ParallelConfig(),
            graphs=graphs,
        )  # fmt: skip
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _join(
    layout: Layout,
    identity: Identity,
    on: torch.device,
    seed: int,
    timeout_minutes: float,
    console_fd: int | None,
    parallel: ParallelConfig,
    graphs: bool = False,
) -> Ranks:
    """Megatron's groups and RNG tracker, once torch.distributed runs."""
    with _without_gtp() if parallel.use_sharp else contextlib.nullcontext():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            distributed_timeout_minutes=timeout_minutes,
            num_distributed_optimizer_instances=parallel.num_distributed_optimizer_instances,
            create_gloo_process_groups=False,
            use_sharp=parallel.use_sharp,
            high_priority_stream_groups=list(parallel.high_priority_stream_groups),
        )
    at = layout.coordinates(identity.rank)
    drawn_from = dropout_seed(seed, layout, at)
    random.seed(drawn_from)  # Triplane draws from none of these three; checkpoints hold their states
    np.random.seed(drawn_from)
    torch.default_generator.manual_seed(drawn_from)
    # Transformer Engine's attention captures with its own tracker alone; where it is missing, Megatron takes its own.
    model_parallel_cuda_manual_seed(drawn_from, te_rng_tracker=graphs, use_cudagraphable_rng=graphs)
    pgs = ProcessGroupCollection.use_mpu_process_groups()
    return Ranks(identity=identity, layout=layout, at=at, device=on, pgs=pgs, console_fd=console_fd)


@contextlib.contextmanager
def _without_gtp() -> Iterator[None]:
    """With use_sharp, megatron-core 0.19.2 asks for DP x CP with the ranks of GTP before it has set that group.

    There is no GTP here, and the group without it, which is the same, is made by then.
    """
    asked = parallel_state.get_data_parallel_group
    parallel_state.get_data_parallel_group = functools.partial(asked, with_gtp_remat=False)
    try:
        yield
    finally:
        parallel_state.get_data_parallel_group = asked


def dropout_seed(seed: int, layout: Layout, at: Coordinates) -> int:
    """Differs over stages, context ranks and replicas, which would otherwise drop the same elements; the same over TP.

    Megatron's tracker itself adds what must differ over TP.
    """
    return seed + 100 * (at.pp + layout.pp * (at.cp + layout.cp * at.dp))


def own_cores(local_world_size: int) -> int:
    """A rank's share of the host's cores, and no more than it is bound to."""
    return max(1, min(len(os.sched_getaffinity(0)), (os.cpu_count() or 1) // local_world_size))


def _prepare_device(device: Literal["cpu", "cuda"], identity: Identity) -> torch.device:
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(own_cores(identity.local_world_size))
    mcore_patches.check_once()
    adam.install()
    if device == "cpu":
        schedule_as_batch()
        cuda_redirect.install()
        eager.install()
        mcore_patches.install()
        # gloo would connect every two members of a group at its start and read one key of the store for each: with it,
        # two ranks connect when they first talk. Without it the one store answers O(world^2) reads before step 1.
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
        return torch.device("cpu")
    # Several ranks may share one GPU (NCCL >= 2.30 with NCCL_MULTI_RANK_GPU_ENABLE=1); else local_rank is its number.
    index = identity.local_rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _leave_together(identity: Identity) -> None:
    """A rank that left early would abort its peers' gloo threads, and rank 0's store would go with it.

    A barrier alone is not enough: gloo connects two ranks when they first talk, which asks the store, so rank 0 may be
    through while others still connect. It stays until the last rank has said that it is through.
    """
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    if store.add("through", 1) == identity.world_size:
        store.set("all through", "")
    if identity.rank == 0:
        store.wait(["all through"])


def _store(identity: Identity, timeout: timedelta, resolve_s: float) -> dist.Store | None:
    """Local ranks meet at a socket that their parent has bound already, so no other program can take the port.

    None: torch's ``env://``, which torchrun and srun describe.
    """
    if identity.port is None and identity.launcher in ("torchrun", "srun"):
        await_master(os.environ, resolve_s)
        if (again := os.environ.get(STAGE)) is None:
            return None
        # torchrun's own store lives on, and has the keys of the meeting before
        store, *_ = next(dist.rendezvous("env://", identity.rank, identity.world_size, timeout=timeout))
        return dist.PrefixStore(f"stage {again}", store)
    if identity.launcher == "single":
        return dist.HashStore()
    return dist.TCPStore(
        "127.0.0.1", identity.port or 0, identity.world_size, is_master=identity.rank == 0, timeout=timeout,
        master_listen_fd=identity.listen_fd, wait_for_workers=False,
    )  # fmt: skip


def same_everywhere(facts: Mapping[str, str], identity: Identity, device: torch.device) -> None:
    """Raises SharedMistake on every rank, naming a rank that differs, unless all ranks hold the same ``facts``.

    Costs two reductions of eight bytes per fact; details travel only when something differs.
    """
    digests = [hashlib.blake2b(f"{key}={value}".encode(), digest_size=8).digest() for key, value in facts.items()]
    numbers = [struct.unpack("<q", digest)[0] for digest in digests]
    lowest, highest = (torch.tensor(numbers, dtype=torch.int64, device=device) for _ in range(2))
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    differing = [key for key, same in zip(facts, (lowest == highest).tolist(), strict=True) if not same]
    if not differing:
        return
    gathered: list[tuple[str, str]] = [("", "")] * identity.world_size
    dist.all_gather_object(gathered, (os.uname().nodename, facts[differing[0]]))
    other = next(rank for rank, (_, value) in enumerate(gathered) if value != gathered[0][1])
    ours, theirs = different_lines(gathered[0][1], gathered[other][1])
    raise SharedMistake(
        f"ranks do not agree on {differing[0]}: rank 0 ({gathered[0][0]}) has {ours}, but rank {other} "
        f"({gathered[other][0]}) has {theirs}. All ranks must run the same code and configuration."
    )


def different_lines(first: str, second: str) -> tuple[str, str]:
    """The lines of either text that the other lacks; "nothing" where there are none."""
    pair = first.splitlines(), second.splitlines()
    only = [[line for line in pair[side] if line not in pair[1 - side]] for side in (0, 1)]
    return " | ".join(only[0]) or "nothing", " | ".join(only[1]) or "nothing"
