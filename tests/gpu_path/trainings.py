"""Trainings on the emulated device, and the same on the CPU."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, cast

import runs
from tests.gpu.trainings import Training, checkpoint_differences, loss_difference
from tests.gpu_path.emulator import ROOT, Emulation, process_environment
from training.cli import parse
from training.run_dir.history import read_history
from training.start.prepare import prepare, prepare_eval_tasks

__all__ = ["Training", "checkpoint_differences", "loss_difference"]
EXTENSION = "tests.gpu_path.te.extension"
"""The hook that emulates Transformer Engine."""
LOSS_BOUND = 1e-5
WEIGHTS_BOUND = 1e-4


class Recipe(Protocol):
    """What is to be trained, as Training is."""

    def write_recipe(self, path: Path) -> int:
        """The number of ranks."""


class TrainingError(Exception):
    """A rank failed, or a kernel computed nothing; the message is what was printed."""


class WarmDevice:
    """A process of the emulated device that has imported torch and Megatron: ranks are forked from it."""

    def __init__(self, process: subprocess.Popen[str], flags: tuple[str, ...] = ()) -> None:
        """flags: before those of every training."""
        self._process, self._flags = process, flags

    def train(self, training: Recipe, run_dir: Path, emulation: Emulation, flags: Sequence[str] = ()) -> str:
        """What the ranks printed. Raises TrainingError."""
        recipe, output = run_dir / "recipe.toml", run_dir / "output.txt"
        world_size = training.write_recipe(recipe)
        arguments = [str(recipe), "--run_dir", str(run_dir), "--device", "cuda", *self._flags, *flags]
        with emulation.variables() as variables:
            code = self._ask(
                {"flags": arguments, "world_size": world_size, "environ": variables, "output": str(output)}
            )
        text = "".join(log.read_text() for log in [output, *sorted(run_dir.glob("logs/rank-*"))] if log.exists())
        if code or "computes nothing" in text:
            raise TrainingError(f"exit code {code}\n{text}")
        return text

    def check(
        self, name: str, *arguments: str, emulation: Emulation | None = None, ranks: int = 1
    ) -> subprocess.CompletedProcess[str]:
        """A program of checks/ on forked ranks."""
        with (emulation or Emulation()).variables() as variables, tempfile.TemporaryDirectory() as folder:
            output, errors = Path(folder, "output"), Path(folder, "errors")
            command = [f"tests.gpu_path.checks.{name}", *arguments]
            request = {"check": command, "world_size": ranks, "environ": variables}
            code = self._ask(request | {"output": str(output), "errors": str(errors)})
            return subprocess.CompletedProcess(command, code, output.read_text(), errors.read_text())

    def _ask(self, request: Mapping[str, object]) -> int:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@contextmanager
def warm_device(*hooks: str, flags: tuple[str, ...] = ()) -> Iterator[WarmDevice]:
    """One for many trainings. hooks: modules that it imports right after torch."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.gpu_path.warm"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env=process_environment() | {"EMULATED_CUDA_HOOKS": ",".join(["tests.gpu_path.forkable", *hooks])},
    )  # fmt: skip
    with process:
        assert process.stdout and process.stdin
        assert process.stdout.readline() == "ready\n"
        yield WarmDevice(process, flags)
        process.stdin.close()


def train_on_the_cpu(run_dir: Path, shape: str, flags: Sequence[str] = ()) -> None:
    """On one rank, forked from this process."""
    Training(shape=shape).write_recipe(run_dir / "recipe.toml")
    config = parse.parse_config([str(run_dir / "recipe.toml"), "--run_dir", str(run_dir), *flags])
    runs.train(prepare(config, None), config, 1, tasks=prepare_eval_tasks(config, None))


def memory_of(run_dir: Path) -> dict[str, dict[str, float]]:
    """Bytes by category, predicted and measured, as the run has noted them."""
    (found,) = (event.fields for event in read_history(run_dir) if event.event == "memory")
    return {side: cast(dict[str, float], found[side]) for side in ("predicted", "measured")}


def assert_same(run_dir: Path, reference: Path) -> None:
    """Losses, and weights and moments of the newest checkpoint by their places in the whole model."""
    assert loss_difference(run_dir, reference) < LOSS_BOUND
    differences = checkpoint_differences(run_dir, reference)
    assert {one.outcome for one in differences} <= {"equal", "differs"}
    worst = max(differences, key=lambda one: one.relative or 0)
    assert (worst.relative or 0) < WEIGHTS_BOUND, worst
