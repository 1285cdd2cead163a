"""The doctor on several "nodes" of this machine: real processes with the environment that a launcher gives."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120.0
QUICK = ("--skip", "gemm", "collectives", "--device", "cpu")
"""Without the measurements, which load torch."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Outcome:
    """What the first node left."""

    code: int
    text: str
    errors: str
    printed: dict[str, Any]
    bad: list[str]

    def checks(self, group: str, status: str) -> list[dict[str, Any]]:
        """The findings of a group."""
        return [one for one in self.printed["checks"] if (one["group"], one["status"]) == (group, status)]

    def words(self, group: str, status: str) -> str:
        """What they say, in one text."""
        return "\n".join(
            f"{','.join(one['nodes'])}: {one['check']}: {one['found']}" for one in self.checks(group, status)
        )


_ports = iter(range(21000 + os.getpid() % 4000, 32000, 17))  # below what Linux hands out; a doctor tries 16
_next_port = threading.Lock()


def free_port() -> int:
    """Never the same twice, for scenarios that are played side by side."""
    while True:
        with _next_port:
            port = next(_ports)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("", port))
                return port


def srun(rank: int, nodes: int, port: int, address: str = "127.0.0.1") -> dict[str, str]:
    """What srun gives a step of one task a node, with what the batch script exports."""
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "NCCL", "GLOO", "MASTER"))
    }
    return {
        **clean,
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(nodes),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{nodes})",
        "SLURM_PROCID": str(rank),
        "SLURM_NODEID": str(rank),
        "SLURM_LOCALID": "0",
        "SLURMD_NODENAME": f"n{rank + 1}",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def start(
    environ: Mapping[str, str], flags: Sequence[str], before: Sequence[str] = (), clock: str = "time.time"
) -> "subprocess.Popen[str]":
    """One node. ``before``: a command that runs it (unshare, nsenter); ``clock``: an expression."""
    code = (
        f"import time; from tools.doctor.__main__ import main; raise SystemExit(main({list(flags)!r}, clock={clock}))"
    )
    return subprocess.Popen(
        [*before, sys.executable, "-c", code],
        cwd=ROOT,
        env={**environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_files(folder: Path, count: int) -> None:
    """Until ``count`` nodes have examined the run's folder."""
    end = time.monotonic() + LIMIT_S
    while len(list(folder.glob("token-*"))) < count and time.monotonic() < end:
        time.sleep(0.1)


def examine(
    folder: Path,
    nodes: int,
    *flags: str,
    absent: Sequence[int] = (),
    more: Mapping[int, Mapping[str, str]] | None = None,
    before: Mapping[int, Sequence[str]] | None = None,
    clocks: Mapping[int, str] | None = None,
    port: int | None = None,
    address: str = "127.0.0.1",
    run_dir: Path | None = None,
    first_comes_last: bool = False,
) -> Outcome:
    """``nodes`` nodes, but for those ``absent``; ``more`` variables, ``before`` and ``clocks`` by rank.

    ``first_comes_last``: rank 0 starts when the others have written to the run's folder: a short --meeting_s will do.
    """
    run_dir = run_dir or folder / "run"
    port = port or free_port()
    files = ["--json", str(folder / "report.json"), "--bad_nodes", str(folder / "bad")]
    given = ["--nodes", "--run_dir", str(run_dir), *files, *flags]
    processes: dict[int, subprocess.Popen[str]] = {}
    for rank in sorted(set(range(nodes)) - set(absent), reverse=first_comes_last):
        if first_comes_last and rank == 0:
            wait_for_files(run_dir / "doctor", len(processes))
        environ = {**srun(rank, nodes, port, address), **(more or {}).get(rank, {})}
        printed = (clocks or {}).get(rank, "time.time")
        processes[rank] = start(environ, given, (before or {}).get(rank, ()), printed)
    try:
        texts = {rank: process.communicate(timeout=LIMIT_S) for rank, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    errors = "".join(texts[rank][1] for rank in texts)
    assert (folder / "report.json").exists(), errors
    return Outcome(
        code=processes[0].returncode,
        text=texts[0][0],
        errors=errors,
        printed=json.loads((folder / "report.json").read_text()),
        bad=(folder / "bad").read_text().splitlines(),
    )


def can_mount() -> bool:
    """Whether this process may have mounts of its own."""
    return shutil.which("unshare") is not None and not subprocess.run(["unshare", "-m", "true"]).returncode


def left_out(possible: bool) -> bool:
    """Whether a test may be skipped: it cannot run here, and this is no place where all must (``TRIPLANE_NEEDS_SLURM``,
    which ``.ci/run`` sets): there it runs, and fails."""
    return not possible and "TRIPLANE_NEEDS_SLURM" not in os.environ
