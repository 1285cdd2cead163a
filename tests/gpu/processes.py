"""Processes of their own for what may crash or hang: a limit for each, and the end of what it printed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from parallel.processes import die_with_parent
from tools.benchmark.circumstances import ROOT

KILLED_S = 15.0
"""A killed process ends within that, or hangs in the driver, where nothing ends it: it is left behind."""
SHOWN = 1500
"""Characters of a process's output that are kept where it fails."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Ended:
    """How a process ended."""

    code: int | None
    """None: stopped at its limit."""
    output: str
    """stdout and stderr."""

    def failure(self, limit_s: float) -> str:
        """What went wrong, with the end of the output; empty: nothing."""
        if self.code == 0:
            return ""
        how = f"stopped after {limit_s:.0f} s" if self.code is None else f"exit code {self.code}"
        if self.code is not None and self.code < 0:
            how = f"killed by {signal.Signals(-self.code).name}"
        return f"{how}: {self.output[-SHOWN:].strip()}"


def run(command: Sequence[str], environ: Mapping[str, str], limit_s: float) -> str:
    """The command's output. Raises RuntimeError, with its end, where it fails or outlasts the limit."""
    ended = end_of(command, environ, limit_s)
    if failure := ended.failure(limit_s):
        raise RuntimeError(failure)
    return ended.output


def end_of(command: Sequence[str], environ: Mapping[str, str], limit_s: float) -> Ended:
    """Wait for a command; at its limit, or Ctrl-C, all of its session is killed. environ: on top of this process's."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=dict(os.environ, **environ), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True, preexec_fn=partial(die_with_parent, os.getpid()),
        )  # fmt: skip
        try:
            code: int | None = process.wait(max(0.0, limit_s))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            kill_session(process)
        output.seek(0)
        return Ended(code=code, output=output.read().decode(errors="replace"))


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """The process and all that it has started and left, but for daemons with sessions of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILLED_S)


def ranks_of(
    measurement: str,
    world_size: int = 1,
    environ: Mapping[str, str] | None = None,
    limit_s: float = 600,
    **arguments: object,
) -> list[Any]:
    """What every rank of a measurement (a module of this package) found; each has new processes.

    Raises RuntimeError with the end of the output where a rank failed or ``limit_s`` seconds were not enough.
    """
    import torch

    with tempfile.TemporaryDirectory(prefix="triplane-gpu-") as folder:
        task = Path(folder, "task.json")
        task.write_text(json.dumps({"measurement": measurement, "world_size": world_size, "arguments": arguments}))
        run([sys.executable, "-m", "tests.gpu.rank", str(task)], environ or {}, limit_s)
        notes = [Path(folder, f"{rank}.pt") for rank in range(world_size)]
        return [torch.load(note, map_location="cpu", weights_only=False) for note in notes]
