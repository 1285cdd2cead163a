"""Faults with which a job goes on, and says so."""

import os
import signal
import subprocess
from pathlib import Path

from tests.faults.job_program import Fault
from tests.faults.job_scene import JobCaseFailed, JobObservation, Scene
from tests.faults.job_transient import wait_for_idle
from tests.faults.processes import WRITER, command_of
from training.checkpoint import folders


def logs_full(scene: Scene) -> JobObservation:
    """The file system of logs/ has not a byte left."""
    logs = scene.run_dir / "logs"
    logs.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(logs)], check=True)
    try:
        fill(logs)
        scene.submit()
        scene.inject(lambda: None)
        return scene.unharmed(*scene.heard("the disk of .*logs is full"))
    finally:
        subprocess.run(["umount", "-l", str(logs)], check=True)


def fill(folder: Path) -> None:
    """Until nothing fits any more."""
    with (folder / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 4096)
        except OSError:
            return


def wandb_gone(scene: Scene) -> JobObservation:
    """log.wandb = online, no key and no network."""
    scene.flags = ("--log.wandb", "online")
    scene.variables = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_INIT_TIMEOUT": "5"}
    scene.submit()
    scene.inject(lambda: None)
    return scene.unharmed(scene.heard("wandb (did not finish|is off)")[0], None)


def writer_killed(scene: Scene) -> JobObservation:
    """kill -9 of the process that saves in the background, while it has nothing to do."""
    scene.submit(Fault(act="wait", iteration=6))
    rank = scene.until_waiting()
    # Killed within the first save, with no other checkpoint to fall back to, it would rightly end the run.
    scene.until(lambda: folders.latest(folders.checkpoints(scene.run_dir)), "the save of 4")
    writer = next(pid for pid in children(rank) if WRITER in command_of(pid))
    scene.inject(lambda: os.kill(writer, signal.SIGKILL))
    scene.let_go()
    line, seconds = scene.heard("iter_0000008 FAILED|checkpoint .* FAILED")
    return scene.unharmed(line, seconds)


def children(pid: int) -> list[int]:
    """Of all threads of a process."""
    found = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(number) for numbers in found for number in numbers]


def one_node_fewer(scene: Scene) -> JobObservation:
    """--nodes=1-2 and parallel.elastic; both spare nodes are drained, so that one is left."""
    drain(scene, "n3", "drain")
    scene.sbatch, scene.flags = ("--nodes", "1-2"), ("--parallel.elastic", "True")
    try:
        scene.submit(Fault(pace_s=0.5))
        scene.until_iteration(5)
        drain(scene, "n2", "drain")
        scene.inject(lambda: scene.cluster.run("scontrol", "requeue", str(scene.job)))
        again_s = scene.again()
        line, _ = scene.heard("parallel.elastic|TP 1 x PP 1 x DP 1")
        scene.end(restarts=1)
        furthest = max(abs(loss / scene.undisturbed.losses[number] - 1) for number, loss in scene.losses().items())
    finally:
        for name in ("n2", "n3"):
            drain(scene, name, "resume")
        wait_for_idle(scene, 3)
    if furthest > 1e-5:
        raise JobCaseFailed(f"losses differ by up to {furthest:.1e} (relative) from those of two ranks")
    return JobObservation(
        printed=line, again_s=again_s, lost=scene.lost(), weights="another layout: losses within 1e-5"
    )


def drain(scene: Scene, name: str, state: str) -> None:
    """No new job on this node, or jobs again."""
    scene.cluster.run("scontrol", "update", f"nodename={name}", f"state={state}", "reason=campaign")


ROWS = {
    "the disk of logs/ full|all": logs_full,
    "wandb unreachable|all": wandb_gone,
    "the process that saves killed|step 6": writer_killed,
    "one node fewer, --nodes=1-2|requeue": one_node_fewer,
}
