"""Ranks without torch, each under a real watchdog, as torchrun or srun would start them: quick to start and to hang.

``python tiny_ranks.py RANK WORLD_SIZE RUN_DIR STEP_TIMEOUT_S WHAT``: WHAT happens in iteration 5 of rank 1
(refused: in the first one, as where rank 0 was not given the run's folder).
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from parallel.failures import guard, report
from parallel.launch import Identity
from program.errors import UserError
from training.config.small_sections import FaultConfig
from training.watchdog import starts
from training.watchdog.heartbeat import Heartbeat
from training.watchdog.rank_monitor import monitored
from training.watchdog.stop_signal import StopSignal

IS_WAITING = "/torch/distributed/distributed_c10d.py"
"""The file name that makes a function a collective; this one waits for a file of each rank's."""


def collective(folder: Path, rank: int, world_size: int) -> None:
    """All ranks meet, or wait for ever: in a frame that looks like torch's, whenever the stack is taken.

    os.access is C: a Python function to ask with would at times be the innermost frame, and this rank the one accused.
    """
    source = (
        "def all_reduce(paths):\n    for path in paths:\n        while not access(path, 0):\n            sleep(0.01)\n"
    )
    names: dict[str, Any] = {"sleep": time.sleep, "access": os.access}
    exec(compile(source, IS_WAITING, "exec"), names)
    (folder / f"{rank}").touch()
    names["all_reduce"]([str(folder / f"{other}") for other in range(world_size)])


def spin() -> None:
    """Never ends."""
    while True:
        pass


def happen(what: str, iteration: int, heartbeat: Heartbeat, run_dir: Path) -> None:
    """``what`` goes wrong."""
    if what == "slow":
        time.sleep(0.6)
    if what == "refused":
        raise RuntimeError("Connection closed by peer")
    if iteration != 5:
        return
    if what == "lost":
        print("waits", flush=True)
        time.sleep(1000)
    (run_dir / "failed").touch()
    if what == "spin":
        spin()
    if what == "raise":
        raise ValueError("a wrong number")
    if what == "mistake":
        raise UserError("the recipe is wrong")
    if what == "wait":
        heartbeat.enter("evaluation")
        print("waits", flush=True)
        time.sleep(1000)


def train(rank: int, world_size: int, run_dir: Path, what: str, heartbeat: Heartbeat) -> int:
    """Eight iterations."""
    for iteration in range(1, 9):
        heartbeat.enter("step", iteration)
        if rank == 1:
            happen(what, iteration, heartbeat, run_dir)
        meeting = run_dir / f"meeting-{iteration}"
        meeting.mkdir(parents=True, exist_ok=True)
        if iteration < 5 or what not in ("raise", "mistake", "lost"):
            collective(meeting, rank, world_size)
        else:
            while not (run_dir / "failed").exists():
                time.sleep(0.01)
            raise RuntimeError("Connection closed by peer")
        heartbeat.stepped()
    return 0


def main(rank: str, world_size: str, run_dir: str, step_timeout_s: str, what: str) -> int:
    """One rank."""
    me = Identity(rank=int(rank), world_size=int(world_size), launcher="torchrun")
    fault = FaultConfig(step_timeout_s=float(step_timeout_s), start_timeout_s=60.0)
    request = StopSignal()
    request.listen()
    request.training = True
    folder = starts.folder_of(Path(run_dir), me, os.environ, None)
    if me.rank == 0:
        starts.begin_start(folder)
    with monitored(fault, folder, me, request, os.environ, cuda=False) as watching:
        heartbeat = watching.heartbeat
        code, failure = guard(lambda _: train(me.rank, me.world_size, Path(run_dir), what, heartbeat), me)
        failure = watching.settle(failure)
        heartbeat.code = code
    if failure is not None:
        report(failure, Path(run_dir), me.world_size)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
