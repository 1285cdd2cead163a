"""A whole program out of a checkout, which a variable of the environment names: what is asked, what it printed."""

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.costs.flops import flops_per_token, peak_flops
from models.shapes import GPTShape
from tests.gpu.subject_run import UnrunError
from training.config.run_config import RunConfig


@dataclass(kw_only=True, slots=True, frozen=True)
class Request:
    """What is to be trained, and for how long."""

    config: RunConfig
    shape: GPTShape
    gpus: tuple[str, ...]
    te: bool
    """Transformer Engine is installed."""
    warmup_steps: int
    steps: int
    limit_s: float

    @property
    def iterations(self) -> int:
        """All of them."""
        return self.warmup_steps + self.steps

    @property
    def launcher(self) -> tuple[str, ...]:
        """Arguments of python's: torchrun on all GPUs of this machine."""
        return "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={len(self.gpus)}"

    def row(self, losses: Sequence[float], times_s: Sequence[float], peak_bytes: float) -> dict[str, Any]:
        """As ``one_side.measure`` returns it, of steps that warmed up and those that count."""
        if len(losses) < self.iterations or len(times_s) < self.iterations:
            raise RuntimeError(f"{len(losses)} losses and {len(times_s)} times were printed of {self.iterations} steps")
        step_s = statistics.median(times_s[-self.steps :])
        seq_length = self.config.model.seq_length
        tokens_per_s = self.config.train.global_batch_size * seq_length / step_s / len(self.gpus)
        flops = tokens_per_s * flops_per_token(self.shape, seq_length)
        published = peak_flops(self.gpus[0], "bf16")
        return {
            "shape": self.config.model.shape, "layers": self.shape.num_layers, "gpus": len(self.gpus),
            "losses": list(losses), "step_s": step_s, "times_s": list(times_s), "tokens_per_s_per_gpu": tokens_per_s,
            "model_tflops_per_gpu": flops / 1e12, "mfu": flops / published if published else None,
            "peak_bytes": peak_bytes,
        }  # fmt: skip


def checkout(variable: str, file: str, program: str) -> Path:
    """The folder that a variable names. Raises UnrunError where it names none with that file."""
    folder = Path(os.environ.get(variable, ""))
    if variable not in os.environ or not (folder / file).is_file():
        raise UnrunError(f"give {variable}=FOLDER, a checkout of {program} with {file}")
    return folder.resolve()
