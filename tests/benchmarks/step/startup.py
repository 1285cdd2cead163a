"""CPU seconds of local ranks from nothing to the end of their first step: forked ranks against torchrun's.

And wall seconds of the answers that need no torch: --help and --dry_run, also of 16,384 ranks on paper.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.benchmarks.circumstances import ROOT

DEMO = "slurm/recipes/demo.toml"
GOAL_OF_TORCHRUN = 1 / 3
REPEATS = 5

# 405B on 16,384 H100s as in arXiv:2407.21783, table 4: TP 8, PP 16, DP 128. 126 layers: shorter outer stages.
PAPER = {
    "model.shape": "llama31_405b",
    "model.seq_length": 8192,
    "dry_run": True,
    "world_size": 16384,
    "train.global_batch_size": 2048,
    "parallel.tensor_model_parallel_size": 8,
    "parallel.sequence_parallel": True,
    "parallel.pipeline_model_parallel_size": 16,
    "parallel.num_layers_in_first_pipeline_stage": 7,
    "parallel.num_layers_in_last_pipeline_stage": 7,
}


def flags_of(values: Mapping[str, object]) -> list[str]:
    """Command-line flags of dotted field names."""
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


FIRST_STEP = {
    "device": "cpu",
    "train.train_iters": 1,
    "train.eval_interval": None,
    "train.generate_tokens": 0,
    "train.sample_interval": None,
    "optimizer.lr_warmup_iters": 0,
    "log.tensorboard": False,
}
"""The demo, to its first step."""

ANSWERS: dict[str, tuple[list[str], float]] = {
    "help": (["--help"], 1.0),
    "dry_run": ([DEMO, "--dry_run", "True"], 1.0),
    "dry_run_16384": (flags_of(PAPER), 3.0),
}
"""Name -> flags of pretrain_gpt.py, and the goal in wall seconds."""


@dataclass(kw_only=True, slots=True, frozen=True)
class StartupCost:
    """What a command and all its processes took."""

    wall_s: float
    cpu_s: float
    """User and system time, of descendants too."""


def first_step(nproc: int) -> dict[str, Any]:
    """One iteration of the demo (its checkpoint included) on ``nproc`` forked ranks and on torchrun's.

    An untimed run comes first: it tokenises the corpus and compiles the bytecode that both others find.
    Raises RuntimeError, with the end of its output, for a command that failed.
    """
    flags = flags_of(FIRST_STEP)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(nproc)]
    command = ["pretrain_gpt.py", DEMO, *flags]
    local = [sys.executable, *command, "--nproc", str(nproc)]
    with tempfile.TemporaryDirectory(prefix="triplane-benchmark-") as scratch:
        _, forked, started = (
            cost_of([*start, "--run_dir", f"{scratch}/{name}"])
            for name, start in (("warm", local), ("local", local), ("torchrun", [*torchrun, *command]))
        )
    return {
        "nproc": nproc,
        "forked_cpu_s": forked.cpu_s,
        "torchrun_cpu_s": started.cpu_s,
        "ratio_cpu": forked.cpu_s / started.cpu_s,
        "forked_wall_s": forked.wall_s,
        "torchrun_wall_s": started.wall_s,
        "goal": GOAL_OF_TORCHRUN,
    }


def answers() -> dict[str, dict[str, float]]:
    """Medians of the answers that a login node should give at once."""
    found = {}
    for name, (flags, goal_s) in ANSWERS.items():
        costs = [cost_of([sys.executable, "pretrain_gpt.py", *flags]) for _ in range(REPEATS)]
        found[name] = {
            "wall_s": statistics.median(cost.wall_s for cost in costs),
            "cpu_s": statistics.median(cost.cpu_s for cost in costs),
            "goal": goal_s,
        }
    return found


def cost_of(command: Sequence[str]) -> StartupCost:
    """Run a command in the checkout with one thread per process. Raises RuntimeError where it fails."""
    environ = dict(os.environ, OMP_NUM_THREADS="1")
    began = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=output, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)  # with the children that the command has waited for
        process.returncode = os.waitstatus_to_exitcode(status)
        wall_s = time.perf_counter() - began
        if process.returncode:
            output.seek(0)
            tail = output.read()[-2000:].decode(errors="replace")
            raise RuntimeError(f"exit code {process.returncode} of {' '.join(command)}:\n{tail}")
    return StartupCost(wall_s=wall_s, cpu_s=used.ru_utime + used.ru_stime)
