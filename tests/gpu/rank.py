"""python -m tests.gpu.rank TASK.json: the ranks of one measurement.

Without a launcher's environment it starts the task's ranks; each of those measures and leaves ``<rank>.pt``.
"""

import importlib
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from parallel import cuda_environment, launch, local_ranks
from parallel.lean_imports import TRANSFORMER_ENGINE
from program.untrusted import read_json
from tests.gpu.measured_models import loaded

MEASUREMENTS = (
    "specs", "losses", "observe", "portable", "steps", "products", "calibration", "stall", "layers", "pretended",
    "one_side", "step_profile",
)  # fmt: skip


def main(path: str) -> int:
    """In a new process. Returns the exit code of the first rank that failed."""
    task = read_json(Path(path))
    if not task["te"]:
        for package in TRANSFORMER_ENGINE:
            sys.modules[package] = None  # type: ignore[assignment]  # as where it is not installed
    identity = launch.detect(os.environ)
    if identity is None and task["world_size"] > 1:
        return local_ranks.spawn_ranks(task["world_size"], [sys.executable, "-m", "tests.gpu.rank", path], os.environ)
    prepare(task)
    return measure(path, task, identity or launch.Identity())


def forked(path: str) -> int:
    """In a fork of a process that has imported everything (tests.gpu.processes)."""
    task = read_json(Path(path))
    prepare(task)
    read_allocator_settings()
    if task["world_size"] == 1:
        return measure(path, task, launch.Identity())
    code, failure = local_ranks.fork_ranks(task["world_size"], partial(measure, path, task))
    if failure is not None:
        kind = "UserError: " if code == 2 else ""  # as a new process's traceback has it
        print(f"rank {failure.rank}: {kind}{failure.text}\n{failure.notes}", file=sys.stderr)
    return code


def prepare(task: dict[str, Any]) -> None:
    """Of a recipe: the environment is that of its run."""
    if "text" in task["arguments"]:
        config = loaded(task["arguments"]["text"])
        offloading = bool(config.train.offload_modules)
        cuda_environment.prepare(os.environ, config.parallel, config.kernels.graphs, offloading=offloading)


def read_allocator_settings() -> None:
    """torch has read the environment already."""
    import torch

    found = [os.environ[name] for name in cuda_environment.ALLOCATOR if name in os.environ]
    if found:
        torch.cuda.memory._set_allocator_settings(found[0])


def measure(path: str, task: dict[str, Any], identity: launch.Identity) -> int:
    """What this rank finds lies beside the task then."""
    assert task["measurement"] in MEASUREMENTS, task["measurement"]
    import torch

    module = importlib.import_module(f"tests.gpu.{task['measurement']}")
    found = module.measure(identity, **task["arguments"])
    torch.save(found, Path(path).parent / f"{identity.rank}.pt")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
