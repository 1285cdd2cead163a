"""Processes of their own for what may crash or hang: a limit for each, and the end of what it printed.

Importing torch, megatron-core and Transformer Engine takes seconds. A process that has done so, and has not
touched CUDA, can fork others that use it (``preload``); where that does not work, each is a new process.
"""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from program.processes import die_with_parent
from tests.benchmarks.circumstances import ROOT

KILLED_S = 15.0
"""A killed process ends within that, or hangs in the driver, where nothing ends it: it is left behind."""
SHOWN = 1500
"""Characters of a process's output that are kept where it fails."""
POLL_S = 0.02
FORKS: list[int] = []
"""The process that preloaded, if any: it and what is forked from it can fork."""


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


@dataclass(kw_only=True, slots=True)
class Child:
    """A process with a session of its own; it dies with this one."""

    pid: int
    output: IO[bytes]
    process: subprocess.Popen[bytes] | None = None
    """Where it is a new one, not a fork."""
    code: int | None = None

    def is_over(self) -> bool:
        """Whether it has ended; ``code`` then tells how."""
        if self.code is None and self.process:
            self.code = self.process.poll()
        elif self.code is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if done else None
        return self.code is not None

    def kill(self) -> None:
        """With all that it has started and left, but for daemons with sessions of their own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        deadline = time.monotonic() + KILLED_S
        while not self.is_over() and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def ended(self, *, stopped: bool = False) -> Ended:
        """Kills its session. stopped: it had not ended by itself."""
        self.kill()
        self.output.seek(0)
        text = self.output.read().decode(errors="replace")
        self.output.close()
        return Ended(code=None if stopped else self.code, output=text)


def start(command: Sequence[str], environ: Mapping[str, str]) -> Child:
    """A new process. environ: on top of this one's."""
    output = tempfile.TemporaryFile()  # noqa: SIM115 (Child closes it)
    process = subprocess.Popen(
        command, cwd=ROOT, env=dict(os.environ, **environ), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        start_new_session=True, preexec_fn=partial(die_with_parent, os.getpid()),
    )  # fmt: skip
    return Child(pid=process.pid, output=output, process=process)


def fork(work: Callable[[], int], environ: Mapping[str, str]) -> Child:
    """A fork of this process, which ends with what ``work`` returns."""
    output, parent = tempfile.TemporaryFile(), os.getpid()  # noqa: SIM115 (Child closes it)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Child(pid=pid, output=output)
    code = 1
    try:
        os.setsid()
        die_with_parent(parent)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        os.chdir(ROOT)
        os.environ.update(environ)
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def preload(modules: Sequence[str]) -> str:
    """Import all that ranks use, without CUDA, so that they can be forked; why they cannot, where that is so.

    A fork that cannot use CUDA (something has asked the driver already) is tried out once.
    """
    # torch then counts devices without starting CUDA in this process, where the driver's NVML answers
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    try:
        from parallel.lean_imports import lean

        with lean("cuda"):
            for module in modules:
                importlib.import_module(module)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    child = fork(use_cuda, {})
    ended = wait(child, limit_s=60)
    if not ended.code:
        FORKS.append(os.getpid())
    return ended.failure(60)


def use_cuda() -> int:
    """The least that starts CUDA."""
    import torch

    return 0 if torch.ones(1, device="cuda").item() == 1 else 1


def run(command: Sequence[str], environ: Mapping[str, str], limit_s: float) -> str:
    """The command's output. Raises RuntimeError, with its end, where it fails or outlasts the limit."""
    return output_of(start(command, environ), limit_s)


def output_of(child: Child, limit_s: float) -> str:
    """What it printed. Raises RuntimeError, with its end, where it fails or outlasts the limit; all is printed then."""
    ended = wait(child, limit_s)
    if failure := ended.failure(limit_s):
        print(ended.output, flush=True)
        raise RuntimeError(failure)
    return ended.output


def wait(child: Child, limit_s: float) -> Ended:
    """Its end; at its limit, or Ctrl-C, all of its session is killed."""
    deadline = time.monotonic() + limit_s
    try:
        while not child.is_over() and time.monotonic() < deadline:
            time.sleep(POLL_S)
    finally:
        stopped = not child.is_over()
        ended = child.ended(stopped=stopped)
    return ended


def ranks_of(
    measurement: str,
    world_size: int = 1,
    environ: Mapping[str, str] | None = None,
    limit_s: float = 600,
    *,
    fresh: bool = False,
    te: bool = True,
    **arguments: object,
) -> list[Any]:
    """What every rank of a measurement (a module of this package) found; each has processes of its own.

    fresh: new ones, where libraries must read the environment as they are imported. te: False leaves Transformer Engine
    out, as where it is not installed: Megatron takes it once and for all, so these are new ones, too. Raises
    RuntimeError with the end of the output where a rank failed or ``limit_s`` seconds were not enough.
    """
    import torch

    from tests.gpu import rank

    with tempfile.TemporaryDirectory(prefix="triplane-gpu-") as folder:
        task = Path(folder, "task.json")
        asked = {"measurement": measurement, "world_size": world_size, "te": te, "arguments": arguments}
        task.write_text(json.dumps(asked))
        if FORKS and te and not fresh:
            child = fork(partial(rank.forked, str(task)), environ or {})
        else:
            child = start([sys.executable, "-m", "tests.gpu.rank", str(task)], environ or {})
        output_of(child, limit_s)
        notes = [Path(folder, f"{number}.pt") for number in range(world_size)]
        return [torch.load(note, map_location="cpu", weights_only=False) for note in notes]
