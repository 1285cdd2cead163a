"""Programs on the emulated CUDA device: the environment of their processes, and how the device behaves."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.gpu_path.device.build import build

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(__file__).resolve().parent / "site"

Order = Literal["eager", "random", "late"]
"""When a stream's work is done: at once; at any legal time, drawn by seed; as late as it legally can be."""


@dataclass(kw_only=True, frozen=True, slots=True)
class Emulation:
    """How the device behaves for one job."""

    order: Order = "eager"
    seed: int = 1
    """Of the order "random"."""
    memory_mib: int = 80 << 10
    """Of each device."""
    capability: int = 90
    """Ten times the compute capability: 90 is Hopper's, 100 Blackwell's."""
    hooks: tuple[str, ...] = ()
    """Modules that are imported in the job's processes, right after torch."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """More variables, for hooks."""

    @contextmanager
    def variables(self) -> Iterator[dict[str, str]]:
        """Of the environment, for all processes of one job; its ranks exchange data through a folder of its own."""
        with tempfile.TemporaryDirectory(prefix="emulated-cuda-", dir="/dev/shm") as exchange:
            yield {
                "EMULATED_CUDA_DIR": exchange,
                "EMULATED_CUDA_ORDER": self.order,
                "EMULATED_CUDA_SEED": str(self.seed),
                "EMULATED_CUDA_MEMORY_MIB": str(self.memory_mib),
                "EMULATED_CUDA_CAPABILITY": str(self.capability),
                "EMULATED_CUDA_HOOKS": ",".join(self.hooks),
                **self.settings,
            }


def process_environment(devices: int = 8) -> dict[str, str]:
    """This process's, with the emulated device in place of CUDA's libraries. Builds the device where it must."""
    built = build()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("EMULATED_CUDA")}
    return inherited | {
        "LD_PRELOAD": str(built / "emulated_cuda.so"),
        "LD_LIBRARY_PATH": str(built),
        "PYTHONPATH": os.pathsep.join([str(SITE), str(ROOT), *filter(None, [inherited.get("PYTHONPATH")])]),
        "EMULATED_CUDA_OPERATORS": str(built / "operators.so"),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(devices))),
        "TORCHDYNAMO_DISABLE": "1",  # Triton wants a GPU
        "OMP_NUM_THREADS": "1",
    }


def run(
    arguments: Sequence[str],
    emulation: Emulation | None = None,
    timeout: float = 200,
    *,
    ranks: int = 1,
    devices: int = 8,
) -> subprocess.CompletedProcess[str]:
    """``python ARGUMENTS`` in the repository's root; on more than one rank by torchrun's agent."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    with (emulation or Emulation()).variables() as variables:
        return subprocess.run(
            [sys.executable, *launcher, *arguments],
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=ROOT,
            env=process_environment(devices) | variables,
        )
