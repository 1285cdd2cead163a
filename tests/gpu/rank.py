"""python -m tests.gpu.rank TASK.json: the ranks of one measurement.

Without a launcher's environment it starts the task's ranks; each of those measures and leaves ``<rank>.pt``.
"""

import importlib
import os
import sys
from pathlib import Path

from parallel import cuda_environment, launch, local_ranks
from parallel.untrusted import read_json
from tests.gpu.measured_models import loaded

MEASUREMENTS = (
    "specs", "losses", "observe", "portable", "steps", "products", "calibration", "stall", "one_side", "step_profile",
)  # fmt: skip


def main(path: str) -> int:
    """Returns the exit code of the first rank that failed."""
    task = read_json(Path(path))
    identity = launch.detect(os.environ)
    if identity is None and task["world_size"] > 1:
        return local_ranks.spawn_ranks(task["world_size"], [sys.executable, "-m", "tests.gpu.rank", path], os.environ)
    identity = identity or launch.Identity()
    assert task["measurement"] in MEASUREMENTS, task["measurement"]
    if "text" in task["arguments"]:  # a recipe: the environment is that of its run
        config = loaded(task["arguments"]["text"])
        cuda_environment.prepare(os.environ, config.parallel, config.kernels.graphs)
    import torch

    module = importlib.import_module(f"tests.gpu.{task['measurement']}")
    found = module.measure(identity, **task["arguments"])
    torch.save(found, Path(path).parent / f"{identity.rank}.pt")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
