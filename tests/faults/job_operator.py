"""Faults that a person has to mend: the job stops with the right words, and nothing is lost."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.faults.job_degraded import fill
from tests.faults.job_program import Fault
from tests.faults.job_scene import JobCaseFailed, JobObservation, Scene
from training.checkpoint import folders

FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")
"""Debian's package faketime. Without it clocks are not injected: one kernel has one clock."""


def cancelled(scene: Scene) -> JobObservation:
    """scancel: it stays cancelled, and the same command goes on from the checkpoint of its last step."""
    scene.submit(Fault(pace_s=0.5))
    scene.until_iteration(5)
    scene.inject(lambda: scene.cluster.run("scancel", str(scene.job)))
    line, seconds = scene.heard("TERM: SLURM ends this job")
    scene.end("CANCELLED", restarts=0)
    return continued(scene, line, seconds)


def crash_loop(scene: Scene) -> JobObservation:
    """The same exception in every start, behind no new checkpoint."""
    scene.variables = {"MAX_ATTEMPTS": "2"}
    scene.submit(Fault(act="raise", every_start=True))
    scene.until_iteration(5)
    scene.inject(lambda: None)
    ended = scene.end("FAILED")
    line = next(line for line in reversed(ended.output.splitlines()) if "not started again" in line)
    return continued(scene, scene.shown(line), None)


def continued(scene: Scene, line: str, seconds: float | None) -> JobObservation:
    """Submitted again, without the fault, it ends with the bits of an undisturbed run."""
    (scene.folder / "out").rename(scene.folder / "out.before")
    scene.variables.pop("MAX_ATTEMPTS", None)
    scene.submit()
    scene.end(restarts=0)
    if (weights := scene.weights()) != "equal":
        raise JobCaseFailed(f"final weights: {weights}")
    return JobObservation(printed=line, verdict_s=seconds, lost=scene.lost(), weights=f"{weights}, submitted again")


@contextlib.contextmanager
def small_disk(folder: Path, options: str) -> Iterator[None]:
    """A file system of its own on ``folder``."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def disk_full(scene: Scene) -> JobObservation:
    """Of checkpoints/, from the start."""
    with small_disk(folders.checkpoints(scene.run_dir), "size=64k"):
        fill(folders.checkpoints(scene.run_dir))
        return refused(scene, "checkpoints cannot be written to .*: No space left on device")


def read_only(scene: Scene) -> JobObservation:
    """The whole run folder."""
    with small_disk(scene.run_dir, "size=1m"):
        subprocess.run(["mount", "-o", "remount,ro", str(scene.run_dir)], check=True)
        return refused(scene, "cannot be written: read-only")


def refused(scene: Scene, words: str) -> JobObservation:
    """Bad input: exit code 2, never again."""
    scene.submit()
    scene.inject(lambda: None)
    line, seconds = scene.heard(words)
    ended = scene.end("FAILED", restarts=0)
    if ended.exit_code != 2:
        raise JobCaseFailed(f"exit code {ended.exit_code}; printed: {ended.output[-1500:]}")
    return JobObservation(printed=line, verdict_s=seconds)


def damaged_shard(scene: Scene) -> JobObservation:
    """The end of a shard's tokens is missing."""
    scene.make_checkout()
    [tokens] = scene.cache_dir.glob("tokens/*/tokens.bin")
    for path in (tokens, tokens.with_suffix(".idx")):
        (scene.folder / path.name).write_bytes(path.read_bytes())
    os.truncate(scene.folder / "tokens.bin", tokens.stat().st_size - 1000)
    scene.flags = ("--data.paths", "tokens")
    return refused(scene, r"tokens\.bin has .* promises")


def two_jobs(scene: Scene) -> JobObservation:
    """A second job on the folder of one that runs."""
    scene.submit(Fault(pace_s=5.0))  # it must still run when the second one has loaded
    scene.until_iteration(1)
    first = scene.job
    second = Scene(
        cluster=scene.cluster, folder=scene.folder, cache_dir=scene.cache_dir, undisturbed=scene.undisturbed,
        sbatch=("--nodes", "1", "--output", f"{scene.folder}/second"), flags=("--nproc", "1"),
    )  # fmt: skip
    second.submit()
    path = scene.folder / "second"
    scene.until(lambda: path.exists() and "another run owns it" in path.read_text(), "the refusal")
    line = next(line for line in path.read_text().splitlines() if "another run owns it" in line)
    second.end("FAILED", restarts=0)
    scene.job = first
    return scene.unharmed(scene.shown(line), None)


def wrong_version(scene: Scene) -> JobObservation:
    """Another megatron-core on the second node: the doctor finds it, and the job moves to the third."""
    stub = scene.folder / "other/megatron_core-0.0.1.dist-info"
    stub.mkdir(parents=True)
    (stub / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.0.1\n")
    scene.make_checkout()
    python = scene.folder / "python"
    python.write_text(
        f'#!/bin/bash\n[ "$SLURMD_NODENAME" = n2 ] && export PYTHONPATH={stub.parent}:$PYTHONPATH\n'
        'exec .venv/bin/python "$@"\n'
    )
    python.chmod(0o755)
    scene.variables = {"DOCTOR": "1", "PYTHON": str(python)}
    scene.submit()
    scene.inject(lambda: None)
    scene.heard(r"megatron.core.* 0\.0\.1")
    return scene.resumed(*scene.heard("the doctor finds n2 bad"))


def wrong_interface(scene: Scene) -> JobObservation:
    """GLOO_SOCKET_IFNAME names an interface that no node has."""
    scene.variables = {"DOCTOR": "1", "GLOO_SOCKET_IFNAME": "nope0", "MAX_ATTEMPTS": "1"}
    scene.submit()
    scene.inject(lambda: None)
    line, seconds = scene.heard("nope0")
    scene.end("FAILED")
    return JobObservation(printed=line, verdict_s=seconds)


def bad_recipe(scene: Scene) -> JobObservation:
    """Five samples cannot be divided over two replicas."""
    scene.flags = ("--train.global_batch_size", "5")
    return refused(scene, "train.global_batch_size 5")


def skewed_clock(scene: Scene) -> JobObservation:
    """Two hours, for all processes of the second node (libfaketime, which the doctor's meeting survives)."""
    scene.make_checkout()
    python = scene.folder / "python"
    python.write_text(
        f'#!/bin/bash\n[ "$SLURMD_NODENAME" = n2 ] && export LD_PRELOAD={FAKETIME} FAKETIME=+2h\n'
        'exec .venv/bin/python "$@"\n'
    )
    python.chmod(0o755)
    scene.variables = {"DOCTOR": "1", "PYTHON": str(python)}
    scene.submit()
    scene.inject(lambda: None)
    return scene.resumed(*scene.heard("WRONG .*n2.* (ahead|behind|apart)"))


ROWS = {
    "scancel|step": cancelled,
    "the same exception in every start|step 6": crash_loop,
    "disk of checkpoints full for good|start": disk_full,
    "run folder read-only|start": read_only,
    "tokens' file truncated|start": damaged_shard,
    "two jobs on one folder|step": two_jobs,
    "another megatron-core on one node|doctor": wrong_version,
    "interface that is not there|doctor": wrong_interface,
    "batch that no layout divides|start": bad_recipe,
    "clock of one node two hours ahead|doctor": skewed_clock,
}
NEEDS = {"clock of one node two hours ahead|doctor": FAKETIME}
"""Files without which a row cannot be injected."""
