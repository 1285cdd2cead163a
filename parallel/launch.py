"""Who am I, and who else is there (torchrun, srun, local ranks, one rank in this process), and on which device."""

import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from parallel.errors import UserError


@dataclass(kw_only=True, slots=True, frozen=True)
class Identity:
    """One process among all ranks. ``listen_fd`` is the rendezvous socket that rank 0 of local ranks inherits."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launcher: Literal["torchrun", "srun", "local", "single"] = "single"
    port: int | None = None
    listen_fd: int | None = None


def detect(environ: Mapping[str, str]) -> Identity | None:
    """This rank as torchrun's or srun's environment describes it; None when nobody has started ranks yet.

    A one-task step (an interactive shell under srun) is not a launcher of ranks.
    """
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environ.keys():
        return Identity(
            rank=int(environ["RANK"]),
            world_size=int(environ["WORLD_SIZE"]),
            local_rank=int(environ.get("LOCAL_RANK", "0")),
            local_world_size=int(environ.get("LOCAL_WORLD_SIZE", "1")),
            launcher="torchrun",
        )
    tasks = int(environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ or tasks == 1:
        return None
    return Identity(
        rank=int(environ["SLURM_PROCID"]),
        world_size=tasks,
        local_rank=int(environ["SLURM_LOCALID"]),
        local_world_size=_tasks_on_node(environ["SLURM_STEP_TASKS_PER_NODE"], int(environ.get("SLURM_NODEID", "0"))),
        launcher="srun",
    )


def _tasks_on_node(text: str, node: int) -> int:
    """SLURM's ``"8(x3),4"`` at node 3 -> 4."""
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts[node]


def node_name(environ: Mapping[str, str]) -> str:
    """This node, as SLURM names it in lists of nodes; else the host's name."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def set_rendezvous(environ: dict[str, str], identity: Identity) -> None:
    """Under srun, give torch's ``env://`` what torchrun would have set. The sbatch script may set MASTER_* itself."""
    if identity.launcher != "srun":
        return
    if "MASTER_ADDR" not in environ:
        nodes = subprocess.run(
            ["scontrol", "show", "hostnames", environ["SLURM_STEP_NODELIST"]],
            capture_output=True,
            text=True,
            check=True,
        )
        environ["MASTER_ADDR"] = nodes.stdout.split()[0]
    environ.setdefault("MASTER_PORT", str(20000 + int(environ["SLURM_JOB_ID"]) % 10000))
    environ.update(
        RANK=str(identity.rank),
        WORLD_SIZE=str(identity.world_size),
        LOCAL_RANK=str(identity.local_rank),
        LOCAL_WORLD_SIZE=str(identity.local_world_size),
    )


def count_gpus(environ: Mapping[str, str]) -> int:
    """GPUs that this node or allocation has, without asking torch (a broken driver must not hide them)."""
    if "CUDA_VISIBLE_DEVICES" in environ:
        visible = environ["CUDA_VISIBLE_DEVICES"].strip()
        return 0 if visible in ("", "-1", "NoDevFiles") else len(visible.split(","))
    if environ.get("SLURM_GPUS_ON_NODE", "0").isdigit() and int(environ.get("SLURM_GPUS_ON_NODE", "0")):
        return int(environ["SLURM_GPUS_ON_NODE"])
    if Path("/dev/dxg").exists():  # a Windows Subsystem for Linux names no single GPU
        return 1
    return len([path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()])


def choose_device(device: Literal["auto", "cpu", "cuda"], environ: Mapping[str, str]) -> Literal["cpu", "cuda"]:
    """``auto`` resolved. Raises UserError where GPUs were found or asked for and torch cannot use them."""
    gpus = count_gpus(environ)
    if device == "cpu" or (device == "auto" and not gpus):
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if torch.version.cuda is None:
        missing = f"torch {torch.__version__} is built without CUDA; install a CUDA build"
    elif not shutil.which("nvidia-smi"):
        missing = "no NVIDIA driver answers (nvidia-smi is not on the PATH)"
    else:
        missing = f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no usable driver; see nvidia-smi"
    found = f"this node has {gpus} GPU(s)" if gpus else "no GPU was found here"
    raise UserError(f'device = "{device}": {found}, but {missing}. To train on the CPU all the same: --device cpu.')
