"""Which node this is, which others there are, and what is to be examined."""

import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from parallel import launch
from program import processes
from program.errors import UserError
from tools.clusters import Cluster


@dataclass(kw_only=True, slots=True, frozen=True)
class DoctorContext:
    """What the subjects may know."""

    node: str
    """SLURM's name of this node, else the host's."""
    host: str
    rank: int
    """Of this node among the nodes."""
    names: tuple[str, ...]
    """Of all nodes by rank; empty ones where the launcher does not tell."""
    launcher: Literal["torchrun", "srun", "alone"]
    master: tuple[str, int] | None
    """Address or name, and port, where ranks will meet."""
    environ: Mapping[str, str]
    device: Literal["cpu", "cuda"]
    gpus: int
    """That this node or its allocation has; 0 with device "cpu"."""
    run_dir: Path | None
    free_gib: float
    cluster: Cluster | None
    clock: Callable[[], float] = time.time
    """Seconds since 1970."""

    @property
    def nodes(self) -> int:
        """How many nodes are examined together."""
        return len(self.names)

    def name_of(self, rank: int) -> str:
        """For people."""
        return self.names[rank] or f"the node of rank {rank}"

    @property
    def is_agents_port(self) -> bool:
        """Whether torchrun itself listens on the master's port (torch.distributed.elastic's agent store)."""
        return self.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"

    @property
    def session(self) -> str:
        """What the nodes of one job step, and only they, call themselves."""
        step = [self.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID")]
        return "/".join([*step, *map(str, self.master or ())])


def machine() -> str:
    """The kernel that runs and its network namespace: two nodes with the same one reach each other by loopback."""
    network = Path("/proc/self/ns/net")
    return f"{processes.machine()}/{network.stat().st_ino if network.exists() else ''}"


def situation(
    nodes: bool,
    environ: Mapping[str, str],
    device: Literal["auto", "cpu", "cuda"],
    run_dir: Path | None,
    free_gib: float,
    cluster: Cluster | None,
    clock: Callable[[], float] = time.time,
) -> DoctorContext | None:
    """This process's; None for a further process of a node. Raises UserError where ``nodes`` names no other node."""
    host = socket.gethostname()
    gpus = 0 if device == "cpu" else launch.count_gpus(environ)
    place = _place(environ) if nodes else _Place(0, (environ.get("SLURMD_NODENAME") or host,), "alone", None)
    if place is None:
        return None
    rank, names, launcher, master = place
    return DoctorContext(
        node=environ.get("SLURMD_NODENAME") or (host if launcher != "torchrun" else f"{host}:{rank}"),
        host=host,
        rank=rank,
        names=names,
        launcher=launcher,
        master=master,
        environ=environ,
        device="cuda" if gpus or device == "cuda" else "cpu",
        gpus=gpus,
        run_dir=run_dir,
        free_gib=free_gib,
        cluster=cluster,
        clock=clock,
    )


class _Place(NamedTuple):
    rank: int
    names: tuple[str, ...]
    launcher: Literal["torchrun", "srun", "alone"]
    master: tuple[str, int] | None


def _place(environ: Mapping[str, str]) -> _Place | None:
    identity = launch.detect(environ)
    if identity is None:
        if "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ:  # a step of one task
            return _Place(0, (environ.get("SLURMD_NODENAME") or socket.gethostname(),), "srun", _master(environ))
        raise UserError(
            "--nodes: expected one process on each node, started by srun or torchrun; found neither's variables. "
            "Start  srun --ntasks-per-node=1 python -m tools.doctor --nodes …  or leave --nodes out to examine this "
            "machine alone."
        )
    if identity.local_rank:
        return None
    reported = dict(environ)
    launch.set_rendezvous(reported, identity)
    local = identity.local_world_size
    if identity.launcher == "torchrun":
        names, usual = ("GROUP_RANK", "GROUP_WORLD_SIZE"), (identity.rank // local, identity.world_size // local)
    else:
        names, usual = ("SLURM_NODEID", "SLURM_STEP_NUM_NODES"), (identity.rank, identity.world_size)
    count = launch.whole_number(environ, names[1], 1, launch.MOST_RANKS, str(usual[1]))
    rank = launch.whole_number(environ, names[0], 0, count - 1, str(usual[0]))
    launcher: Literal["torchrun", "srun"] = "torchrun" if identity.launcher == "torchrun" else "srun"
    return _Place(rank, _names(environ, count), launcher, _master(reported))


def _master(environ: Mapping[str, str]) -> tuple[str, int] | None:
    if not environ.get("MASTER_ADDR") or not environ.get("MASTER_PORT"):
        return None
    return environ["MASTER_ADDR"], launch.whole_number(environ, "MASTER_PORT", 1, 65535)


def _names(environ: Mapping[str, str], count: int) -> tuple[str, ...]:
    """By SLURM's list where it can be had; it is in the order of SLURM_NODEID."""
    listed = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    names, _ = launch.node_names(listed, timeout_s=10) if listed else ([], "")
    return tuple(names if len(names) == count else [""] * count)
