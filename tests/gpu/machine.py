"""What there is: GPUs, driver, and the versions of what runs on them."""

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.benchmarks.circumstances import commit, now, versions

DISTRIBUTIONS = ("torch", "megatron-core", "transformer-engine", "flash-attn", "numpy")
MULTI_RANK_NCCL = (2, 30)
"""The first NCCL that lets several ranks share one GPU (NCCL_MULTI_RANK_GPU_ENABLE=1)."""


@dataclass(kw_only=True, slots=True, frozen=True)
class GpuMachine:
    """The GPUs of this machine and the libraries that use them."""

    gpus: tuple[str, ...] = ()
    """Their names, as torch tells them."""
    capability: tuple[int, int] = (0, 0)
    """Compute capability of the first."""
    memory_gib: float = 0.0
    """Of the first."""
    driver: str | None = None
    """None: no driver answers, and nothing that is found here is a card's."""
    cuda: str | None = None
    nccl: tuple[int, ...] = ()
    versions: dict[str, str | None] = field(default_factory=dict)

    @property
    def has_te(self) -> bool:
        """Whether Transformer Engine is installed."""
        return self.versions.get("transformer-engine") is not None

    @property
    def has_fp8(self) -> bool:
        """Whether the GPU has fp8 tensor cores: Ada, Hopper and newer."""
        return self.capability >= (8, 9)

    @property
    def has_fp4(self) -> bool:
        """Whether it has fp4 tensor cores, and products in mxfp8: Blackwell and newer."""
        return self.capability >= (10, 0)

    @property
    def nccl_name(self) -> str:
        """Like "2.29.7"."""
        return ".".join(map(str, self.nccl))

    @property
    def slug(self) -> str:
        """For a file name: "8x-nvidia-h200"."""
        return f"{len(self.gpus)}x-" + re.sub(r"[^a-z0-9]+", "-", self.gpus[0].lower()).strip("-")

    def lines(self) -> list[str]:
        """For the console."""
        found = [f"{name} {version or 'not installed'}" for name, version in self.versions.items()]
        return [
            f"{len(self.gpus)} x {self.gpus[0]}, {self.memory_gib:.0f} GiB, driver {self.driver}",
            f"CUDA {self.cuda}, NCCL {self.nccl_name}, {', '.join(found)}; commit {commit()}",
        ]

    def record(self) -> dict[str, Any]:
        """For the JSON."""
        return {
            "date": now(),
            "commit": commit(),
            "gpus": list(self.gpus),
            "capability": list(self.capability),
            "memory_gib": self.memory_gib,
            "driver": self.driver,
            "cuda": self.cuda,
            "nccl": list(self.nccl),
            "versions": self.versions,
        }

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> "GpuMachine":
        """Of a ``record``; of an empty one, a machine that is not known yet."""
        if not found:
            return cls()
        return cls(
            gpus=tuple(found["gpus"]),
            capability=(found["capability"][0], found["capability"][1]),
            memory_gib=found["memory_gib"],
            driver=found["driver"],
            cuda=found["cuda"],
            nccl=tuple(found["nccl"]),
            versions=found["versions"],
        )


def look() -> GpuMachine:
    """The GPUs that torch can use; there must be one."""
    import torch

    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return GpuMachine(
        gpus=tuple(each.name for each in properties),
        capability=(properties[0].major, properties[0].minor),
        memory_gib=properties[0].total_memory / 2**30,
        driver=driver(),
        cuda=torch.version.cuda,
        nccl=tuple(torch.cuda.nccl.version()),
        versions=versions(DISTRIBUTIONS),
    )


def driver() -> str | None:
    """The driver's version, as nvidia-smi tells it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.split("\n")[0].strip() or None
