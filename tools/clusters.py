"""A cluster as slurm/clusters/NAME.toml describes it. No torch here."""

import difflib
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cattrs

from parallel.errors import UserError

FOLDER = Path(__file__).resolve().parent.parent / "slurm/clusters"


@dataclass(kw_only=True, slots=True, frozen=True)
class Gpu:
    """One card. peak_tflops: dense, by number format; a format that it cannot compute in is missing."""

    name: str
    memory_gib: float
    memory_gb_per_s: float
    peak_tflops: dict[str, float]


@dataclass(kw_only=True, slots=True, frozen=True)
class Node:
    gpus_per_node: int
    cpus_per_node: int
    memory_gib: float


@dataclass(kw_only=True, slots=True, frozen=True)
class Fabric:
    """Links: scale-up (NVLink, PCIe) within a domain of GPUs, NICs between nodes. One direction, GB/s."""

    scale_up_gb_per_s: float
    scale_up_domain: int
    scale_up_latency_us: float
    kind: str
    nics_per_node: int
    nic_gb_per_s: float
    latency_us: float


@dataclass(kw_only=True, slots=True, frozen=True)
class Price:
    usd_per_gpu_hour: float
    source: str = ""
    date: str = ""


@dataclass(kw_only=True, slots=True, frozen=True)
class Cluster:
    """Everything of one file."""

    name: str
    gpu: Gpu
    node: Node
    fabric: Fabric
    price: Price | None = None
    slurm: dict[str, Any]
    env: dict[str, str]


def names() -> list[str]:
    """The clusters of slurm/clusters."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name_or_path: str) -> Cluster:
    """A cluster by name, or by the path of its file. Raises UserError with the nearest names."""
    path = Path(name_or_path) if name_or_path.endswith(".toml") else FOLDER / f"{name_or_path}.toml"
    if not path.is_file():
        near = difflib.get_close_matches(name_or_path, names(), n=3, cutoff=0.3)
        hint = f"Did you mean {' or '.join(near)}?" if near else f"There are: {', '.join(names())}."
        raise UserError(f'cluster "{name_or_path}" is unknown. {hint}')
    try:
        table = tomllib.loads(path.read_text())
        return cattrs.structure({"name": path.stem, "slurm": {}, "env": {}} | table, Cluster)
    except (tomllib.TOMLDecodeError, cattrs.BaseValidationError) as error:
        raise UserError(f"{path}: not a cluster file: {error}") from None
