"""The same weights, data and hyperparameters in both programs: their losses.

Both begin with a new optimizer and the weights of a checkpoint that Triplane writes after one iteration; tools.reshard
makes Megatron-LM's of it.
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.gpu_path.emulator import ROOT
from tests.gpu_path.megatron_lm.both import Programs
from tests.gpu_path.megatron_lm.cases import Case

ITERATIONS = 20


@dataclass(frozen=True, slots=True)
class Twin:
    """Losses by iteration."""

    case: Case
    ours: list[float]
    megatrons: list[float]

    @property
    def difference(self) -> float:
        """Largest one, relative."""
        assert len(self.ours) == len(self.megatrons) == ITERATIONS, (len(self.ours), len(self.megatrons))
        return max(abs(one - other) / abs(other) for one, other in zip(self.ours, self.megatrons, strict=True))


def run_twin(programs: Programs, case: Case, data: str) -> Twin:
    """Trains both."""
    name = "".join(letter if letter.isalnum() else "_" for letter in case.name)
    given = case.command_flags(data, ITERATIONS, 1)
    programs.ours(case, f"weights_{name}", given, ("--train.exit_interval", "1"))
    weights, megatrons = programs.folder / f"weights_{name}", programs.folder / f"megatron_{name}_weights"
    reshard(weights, megatrons)
    ours = programs.ours(
        case, f"ours_{name}", given, ("--checkpoint.load", str(weights), "--checkpoint.finetune", "True")
    )
    loaded = ("--load", str(megatrons), "--finetune", "--no-load-optim", "--no-load-rng", *case.megatron_only.split())
    theirs = programs.megatrons(case, f"megatron_{name}", given, loaded)
    return Twin(case, ours[0]["losses"], next(log["losses"] for log in theirs if log["losses"]))


def reshard(source: Path, target: Path) -> None:
    """Weights alone, as GPTModel names them."""
    command = ["-m", "tools.reshard", str(source), str(target), "--format", "megatron", "--keys", "stacked"]
    subprocess.run([sys.executable, *command, "--drop_optimizer"], cwd=ROOT, check=True, capture_output=True)
