"""Who am I, and who else is there (torchrun, srun, local ranks, one rank in this process), and on which device."""

import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from program.errors import UserError, printable

RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LISTEN_FD = "TRIPLANE_LISTEN_FD"
"""Of ranks that ``spawn_ranks`` has started: the descriptor of a socket at MASTER_PORT, which rank 0 inherits."""
MOST_RANKS, MOST_BYTES = 1 << 20, 1 << 20

STAGE = "TRIPLANE_STAGE_STARTS"
"""Of a process that has begun another stage of its run: how often, since ranks that a launcher has started once meet
again; and the iteration that it continues."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Identity:
    """One process among all ranks. ``port``: where local ranks meet; ``listen_fd``: the socket there, which rank 0
    inherits."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launcher: Literal["torchrun", "srun", "local", "single"] = "single"
    port: int | None = None
    listen_fd: int | None = None


def detect(environ: Mapping[str, str]) -> Identity | None:
    """This rank as torchrun's or srun's environment describes it; None when nothing has started ranks yet.

    A one-task step (an interactive shell under srun) is not a launcher of ranks. Raises UserError for variables that
    are not numbers, out of range, or incomplete: to train alone instead would be another run than was meant.
    """
    given = [name for name in RENDEZVOUS if name in environ]
    if len(given) == len(RENDEZVOUS):
        return _under_torchrun(environ)
    some = whole_number(environ, "WORLD_SIZE", 1, MOST_RANKS, "1"), whole_number(environ, "RANK", 0, MOST_RANKS, "0")
    if some != (1, 0):
        missing = ", ".join(name for name in RENDEZVOUS if name not in environ)
        raise UserError(
            f"{', '.join(given)} set in the environment, but not {missing}: expected all of {', '.join(RENDEZVOUS)}, "
            "as torchrun sets them. Set them, or unset those to start local ranks (--nproc)."
        )
    tasks = whole_number(environ, "SLURM_STEP_NUM_TASKS", 1, MOST_RANKS, "1")
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ or tasks == 1:
        return None
    local_world_size = _tasks_on_node(environ)
    return Identity(
        rank=whole_number(environ, "SLURM_PROCID", 0, tasks - 1),
        world_size=tasks,
        local_rank=whole_number(environ, "SLURM_LOCALID", 0, local_world_size - 1),
        local_world_size=local_world_size,
        launcher="srun",
    )


def _under_torchrun(environ: Mapping[str, str]) -> Identity:
    """Of torchrun, and of ``spawn_ranks``."""
    whole_number(environ, "MASTER_PORT", 1, 65535)
    if not environ["MASTER_ADDR"].strip():
        raise UserError("MASTER_ADDR is empty in the environment: expected rank 0's host name or address.")
    world_size = whole_number(environ, "WORLD_SIZE", 1, MOST_RANKS)
    local_world_size = whole_number(environ, "LOCAL_WORLD_SIZE", 1, world_size, "1")
    rank, ours = whole_number(environ, "RANK", 0, world_size - 1), LISTEN_FD in environ
    return Identity(
        rank=rank,
        world_size=world_size,
        local_rank=whole_number(environ, "LOCAL_RANK", 0, local_world_size - 1, "0"),
        local_world_size=local_world_size,
        launcher="torchrun",
        port=whole_number(environ, "MASTER_PORT", 1, 65535) if ours else None,
        listen_fd=whole_number(environ, LISTEN_FD, 0, 1 << 20) if ours and rank == 0 else None,
    )


def whole_number(environ: Mapping[str, str], name: str, least: int, most: int, default: str | None = None) -> int:
    """A variable of the environment. Raises UserError where it is missing, not a number, or out of range."""
    text = environ.get(name) or default
    if text is not None and re.fullmatch(r"\s*\d{1,18}\s*", text) and least <= int(text) <= most:
        return int(text)
    found = "none" if text is None else f'"{text[:60]}"'
    raise UserError(f"{name} in the environment: expected a whole number from {least} to {most}, found {found}.")


def _tasks_on_node(environ: Mapping[str, str]) -> int:
    """Of this node: SLURM's ``"8(x3),4"`` at node 3 -> 4."""
    name, counts = "SLURM_STEP_TASKS_PER_NODE", list[int]()
    text = environ.get(name, "")
    for part in text.split(",") if len(text) < MOST_BYTES else ():
        matched = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part.strip())
        counts += [int(matched[1])] * int(matched[2] or 1) if matched else []
        if not matched or len(counts) > MOST_RANKS:
            raise UserError(f'{name} in the environment: expected counts such as "8(x3),4", found "{text[:60]}".')
    node = whole_number(environ, "SLURM_NODEID", 0, max(0, len(counts) - 1), "0")
    if not counts or not 1 <= counts[node] <= MOST_RANKS:
        raise UserError(f'{name} in the environment: expected the tasks of node {node}, found "{text[:60]}".')
    return counts[node]


def node_name(environ: Mapping[str, str]) -> str:
    """This node, as SLURM names it in lists of nodes; else the host's name."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def set_rendezvous(environ: dict[str, str], identity: Identity) -> None:
    """Under srun, give torch's ``env://`` what torchrun would have set. The sbatch script may set MASTER_* itself."""
    if identity.launcher != "srun":
        return
    if "MASTER_ADDR" not in environ:
        environ["MASTER_ADDR"] = _first_node(environ.get("SLURM_STEP_NODELIST", ""))
    job = whole_number(environ, "SLURM_JOB_ID", 0, (1 << 63) - 1, "0")
    environ.setdefault("MASTER_PORT", str(20000 + job % 10000))
    whole_number(environ, "MASTER_PORT", 1, 65535)
    environ.update(
        RANK=str(identity.rank),
        WORLD_SIZE=str(identity.world_size),
        LOCAL_RANK=str(identity.local_rank),
        LOCAL_WORLD_SIZE=str(identity.local_world_size),
    )


def await_master(environ: Mapping[str, str], within_s: float) -> None:
    """Wait until MASTER_ADDR resolves. A Kubernetes headless service's name does so only once rank 0's pod is ready.

    Raises UserError after ``within_s`` seconds: torch would go on in silence until a watchdog ends the rank.
    """
    name, began, said = environ["MASTER_ADDR"], time.monotonic(), False
    while True:
        try:
            socket.getaddrinfo(name, None)
            return
        except (OSError, UnicodeError) as error:
            problem = (
                f'MASTER_ADDR in the environment: "{name[:100]}" does not resolve on {node_name(environ)} ({error})'
            )
        if time.monotonic() - began > within_s:
            raise UserError(
                f"{problem} after {within_s:.0f} s. Set it to rank 0's host name or address, or mend the name service."
            )
        if not said:
            print(printable(f"{problem}; retrying for {within_s:.0f} s."), file=sys.stderr, flush=True)
        said = True
        time.sleep(1)


def _first_node(nodes: str) -> str:
    """Of a list as SLURM writes it. Raises UserError where scontrol cannot tell."""
    names, problem = node_names(nodes, timeout_s=60)
    if not names:
        raise UserError(
            f'the first of the nodes "{nodes[:60]}" (SLURM_STEP_NODELIST) is unknown: scontrol: {problem[:200]}. '
            "Set MASTER_ADDR to rank 0's host name or address."
        )
    return names[0]


def node_names(listed: str, timeout_s: float) -> tuple[list[str], str]:
    """Of a list as SLURM writes it, in its order. Where scontrol cannot tell: none, and why."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", listed], capture_output=True, text=True, timeout=timeout_s
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], str(error)
    return done.stdout.split(), done.stderr.strip()


def count_gpus(environ: Mapping[str, str]) -> int:
    """GPUs that this node or allocation has, without asking torch (a broken driver must not hide them)."""
    if "CUDA_VISIBLE_DEVICES" in environ:
        visible = environ["CUDA_VISIBLE_DEVICES"].strip()
        return 0 if visible in ("", "-1", "NoDevFiles") else len(visible.split(","))
    if gpus := whole_number(environ, "SLURM_GPUS_ON_NODE", 0, MOST_RANKS, "0"):
        return gpus
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
