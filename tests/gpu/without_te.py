"""A measurement of ``one_side`` in a process that cannot import Transformer Engine, installed or not.

python -m tests.gpu.without_te FOLDER: one rank, which FOLDER/task.json describes; its answer is FOLDER/found.json.

A rank may be forked from a process that has imported Megatron with Transformer Engine. Megatron takes modules, its
optimizer and norms of gradients from there once and for all, so such a process cannot do without.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallel.launch import Identity
from parallel.untrusted import read_json
from tools.benchmark.circumstances import ROOT
from training.lean_imports import TRANSFORMER_ENGINE


def is_wanted() -> bool:
    """False within that process."""
    return any(sys.modules.get(package, "") is not None for package in TRANSFORMER_ENGINE)


def measured(identity: Identity, arguments: Mapping[str, object]) -> Any:
    """What ``one_side.measure`` finds there. Raises RuntimeError, the process having said why."""
    with tempfile.TemporaryDirectory(prefix="triplane-without-te-") as folder:
        task = {"identity": dataclasses.asdict(identity), "arguments": arguments}
        Path(folder, "task.json").write_text(json.dumps(task))
        inherited = () if identity.listen_fd is None else (identity.listen_fd,)
        command = [sys.executable, "-m", "tests.gpu.without_te", folder]
        done = subprocess.run(command, cwd=ROOT, env=os.environ, pass_fds=inherited)
        if done.returncode:
            raise RuntimeError(f"without Transformer Engine: exit code {done.returncode}")
        return json.loads(Path(folder, "found.json").read_text())


def main(folder: str) -> None:
    """As where it is not installed: None is the import system's own way to say that."""
    for package in TRANSFORMER_ENGINE:
        sys.modules[package] = None  # type: ignore[assignment]
    from tests.gpu import one_side

    task = read_json(Path(folder, "task.json"))
    found = one_side.measure(Identity(**task["identity"]), **task["arguments"], te=False)
    Path(folder, "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
