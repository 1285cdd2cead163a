"""Clusters, one TOML file each: node, fabric, price, and the environment that NCCL and torch need there.

    eval "$(python -m tools.clusters h100_ib)"        what slurm/pretrain.sbatch does for CLUSTER=h100_ib
    sbatch $(python -m tools.clusters gb200 --sbatch) --nodes 18 slurm/pretrain.sbatch RECIPE.toml

NAME stands for slurm/clusters/NAME.toml; a path to a file of your own will do, too. Variables that are already set
are left as they are. Variables that NCCL and torch do not read (any more) are warned of. Exit codes: 0; 2 for a
cluster that is unknown or wrong.
"""

import difflib
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from os import environ
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from program import command
from program.errors import UserError
from program.flags import parse_flags
from program.schema import fits, structured
from program.untrusted import read_toml
from tools import nccl_env
from training.config.recipe import did_you_mean

FOLDER = Path(__file__).parent.parent / "slurm" / "clusters"
DTYPES = ("bf16", "fp16", "fp8", "tf32", "fp32")


@dataclass(kw_only=True, slots=True, frozen=True)
class Gpu:
    """One GPU."""

    name: str
    """As torch.cuda.get_device_name prints it."""
    memory_gib: float
    """That programs can allocate."""
    memory_gb_per_s: float
    peak_tflops: dict[str, float]
    """Dense matrix products by number format (``DTYPES``); a missing one: the card cannot."""


@dataclass(kw_only=True, slots=True, frozen=True)
class NodeHardware:
    """One node: what runs one operating system."""

    gpus_per_node: int
    cpus_per_node: int
    """Cores as SLURM counts them, hyper-threads aside."""
    memory_gib: float
    launch_us: float = 13.5
    """That the host takes to launch a kernel from PyTorch's modules: by default what a forward pass of torch.nn.Linear
    took on a DGX H100's Xeon 8480C (NVIDIA/TransformerEngine issue #2053)."""
    host_link_gb_per_s: float = 55.0
    """Of one GPU to the host's memory, in one direction: by default PCIe 5.0 x16, of 63 GB/s what copies reach."""
    host_memory_gb_per_s: float = 614.0
    """Of all GPUs' host memory together: by default two Xeons with 8 channels of DDR5-4800 each (a DGX H100's)."""
    collective_launch_us: float = 89.0
    """The same of a collective: by default what torch.distributed's all-reduce took on the host (pytorch/pytorch issue
    #138773, where gathers and scatters took 131 and 122)."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Fabric:
    """What connects GPUs. Bandwidths are for one direction, in 10^9 bytes per second."""

    scale_up_gb_per_s: float
    """Of one GPU to the others of its domain (NVLink, or PCIe)."""
    scale_up_domain: int
    """GPUs that are connected so."""
    scale_up_latency_us: float
    kind: Literal["infiniband", "efa", "ethernet"]
    nics_per_node: int
    nic_gb_per_s: float
    """Of each."""
    latency_us: float
    """Between two nodes."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Price:
    """What one GPU costs, its share of node and network included."""

    usd_per_gpu_hour: float
    source: str
    date: str


@dataclass(kw_only=True, slots=True, frozen=True)
class Slurm:
    """What the batch script cannot know, since it must be said when a job is submitted."""

    flags: tuple[str, ...] = ()
    """Flags of sbatch."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Cluster:
    """Everything that differs from one cluster to another."""

    name: str
    gpu: Gpu
    node: NodeHardware
    fabric: Fabric
    price: Price
    slurm: Slurm = Slurm()
    env: dict[str, str] = field(default_factory=dict)
    """Variables for NCCL, torch and the network's libraries."""
    measured: dict[str, Any] = field(default_factory=dict)
    """What ``tools.plan calibrate`` found, with versions, for people to read; ``constants`` in it, numbers by name,
    take the place of the planner's own (tools/plan/cost/constants.py)."""

    def problems(self) -> list[str]:
        """What is wrong with the values."""
        numbers = {
            f"{section}.{name}": value
            for section in ("gpu", "node", "fabric", "price")
            for name, value in (
                (each.name, getattr(getattr(self, section), each.name)) for each in fields(_sections()[section])
            )
            if isinstance(value, int | float)
        }
        found = [f"{name} must be above 0, found {value}." for name, value in numbers.items() if value <= 0]
        found += [
            f"gpu.peak_tflops.{name}: unknown number format. Known: {', '.join(DTYPES)}."
            for name in self.gpu.peak_tflops
            if name not in DTYPES
        ]
        if not fits(self.measured.get("constants", {}), dict[str, float]):
            found.append("measured.constants: expected a table of numbers. calibrate writes it.")
        domain, gpus = self.fabric.scale_up_domain, self.node.gpus_per_node
        if not found and domain % gpus and gpus % domain:
            found.append(
                f"fabric.scale_up_domain {domain}: expected whole nodes of node.gpus_per_node {gpus}, or an equal part."
            )
        names = (name for name in self.env if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name))
        return found + [f"env: {name!r} is no name of a variable." for name in names]


def known_clusters() -> list[str]:
    """The names in slurm/clusters."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name_or_path: str) -> Cluster:
    """The cluster of that name in slurm/clusters, or in that file (``*.toml``).

    Raises UserError for an unknown one, with the nearest names, and with everything that is wrong in a file.
    """
    path = Path(name_or_path) if name_or_path.endswith(".toml") else FOLDER / f"{name_or_path}.toml"
    try:
        table = read_toml(path)
    except FileNotFoundError:
        near = difflib.get_close_matches(Path(name_or_path).stem, known_clusters(), n=3, cutoff=0.4)
        hint = f"Did you mean {' or '.join(near)}?" if near else f"There are: {', '.join(known_clusters())}."
        raise UserError(
            f"cluster {name_or_path}: unknown. {hint} A file of your own is named with its path: ./mine.toml."
        ) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}.") from None
    absent: dict[str, dict[str, Any]] = {
        section: {} for section in _sections()
    }  # so that each missing key of it is named
    cluster, problems = structured({"name": path.stem, **absent, **table}, Cluster, _unknown_key)
    problems = problems or cluster.problems()
    if problems:
        raise UserError("\n".join(f"{path}: {problem}" for problem in problems))
    found: Cluster = cluster
    return found


def exports(cluster: Cluster, already: Mapping[str, str]) -> list[str]:
    """Lines for a shell, one for each variable of ``cluster`` that is not set ``already``."""
    return [f"export {name}={shlex.quote(value)}" for name, value in cluster.env.items() if name not in already]


def sbatch_flags(cluster: Cluster) -> list[str]:
    """What sbatch must know of this cluster: ranks and GPUs of a node, and the flags of ``[slurm]``."""
    gpus = cluster.node.gpus_per_node
    return [f"--ntasks-per-node={gpus}", f"--gpus-per-node={gpus}", *cluster.slurm.flags]


@dataclass(kw_only=True)
class Clusters:
    """Print what a cluster's file says, for a shell."""

    name: Annotated[str | None, tyro.conf.Positional] = None
    """A cluster of slurm/clusters, or the path of a TOML file. None: only check the variables that are set."""
    sbatch: bool = False
    """Print flags for sbatch instead of exports."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the exports, and warnings on stderr."""
    job = parse_flags(Clusters, argv, "python -m tools.clusters", __doc__)
    try:
        cluster = load(job.name) if job.name else None
    except UserError as error:
        print(f"clusters: {error}", file=sys.stderr)
        return 2
    if job.sbatch:
        print(" ".join(sbatch_flags(cluster)) if cluster else "")
        return 0
    for text in nccl_env.warnings(environ, "the environment"):
        print(f"warning: {text}", file=sys.stderr)
    if cluster:
        for text in nccl_env.warnings(cluster.env, f"cluster {cluster.name}, [env]"):
            print(f"warning: {text}", file=sys.stderr)
        print("\n".join(exports(cluster, environ)))
    return 0


def _sections() -> dict[str, type]:
    return {"gpu": Gpu, "node": NodeHardware, "fabric": Fabric, "price": Price, "slurm": Slurm}


def _unknown_key(name: str, kind: type) -> str:
    if "." not in name:
        return f"unknown section {name}.{did_you_mean(name, [*_sections(), 'env', 'measured'])}"
    known = [f"{section}.{each.name}" for section, owner in _sections().items() for each in fields(owner)]
    return f"unknown key {name}.{did_you_mean(name, known)}"


if __name__ == "__main__":
    raise SystemExit(command.run("tools.clusters", main))
