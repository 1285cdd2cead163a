"""Faults that pass: the job starts again by itself and ends with the bits of an undisturbed run."""

import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from tests.faults.job_program import Fault, Place
from tests.faults.job_scene import JobCaseFailed, JobObservation, Scene
from tests.faults.private_cluster import until
from training.checkpoint import folders
from training.checkpoint.format.writer import DATA
from training.run_lock.record import OWNER

PLACES: Mapping[Place, tuple[str, int]] = {
    "start": ("start: imports", 0),
    "data": ("start: data", 0),
    "step": ("step 6", 6),
    "evaluation": ("evaluation after 8", 8),
    "save": ("save of 8", 8),
    "shutdown": ("shutdown", 0),
}
"""Where a rank can be hit, in words, and the iteration that goes with it."""


HANGS: Sequence[Place] = ("data", "step", "evaluation", "save")


def killed(scene: Scene, place: Place, rank: int = 1) -> JobObservation:
    """kill -9."""
    scene.submit(Fault(act="wait", place=place, iteration=PLACES[place][1], rank=rank))
    pid = scene.until_waiting()
    scene.inject(lambda: os.kill(pid, signal.SIGKILL))
    # Before our code is imported only SLURM can say it.
    words = rf"task {rank}: Killed" if place == "start" else rf"rank {rank} of 2 .*(SIGKILL|killed)"
    return scene.resumed(*scene.heard(words))


def _send(number: signal.Signals, pid: int) -> None:
    os.kill(pid, number)


def stopped(scene: Scene) -> JobObservation:
    """SIGSTOP: no rank gets an error, all wait."""
    scene.submit(Fault(act="wait"))
    pid = scene.until_waiting()
    scene.inject(lambda: os.kill(pid, signal.SIGSTOP))
    return scene.resumed(*scene.heard(r"rank 1 of 2 .* hangs .*SIGSTOP"))


def hung(scene: Scene, place: Place = "step") -> JobObservation:
    """A rank that waits for something that never comes."""
    scene.submit(Fault(act="wait", place=place, iteration=PLACES[place][1]))
    scene.until_waiting()
    scene.inject(lambda: None)
    return scene.resumed(*scene.heard(r"rank 1 of 2 .* hangs"))


def after_the_end(scene: Scene, act: Callable[[int], object], words: str) -> JobObservation:
    """Rank 1 falls while all leave: what was to be trained is trained and saved, so nothing is started again."""
    scene.submit(Fault(act="wait", place="shutdown"))
    pid = scene.until_waiting()
    scene.inject(lambda: act(pid))
    line, seconds = scene.heard(words)
    ended = scene.end("FAILED", restarts=0)
    if "done with a checkpoint of iteration 12" not in ended.output or (weights := scene.weights()) != "equal":
        raise JobCaseFailed(f"not done; printed: {ended.output[-1500:]}")
    return JobObservation(printed=line, verdict_s=seconds, lost=scene.lost(), weights=f"{weights}, not started again")


def raised(scene: Scene) -> JobObservation:
    """An exception on one rank."""
    scene.submit(Fault(act="raise"))
    scene.until_iteration(5)
    scene.inject(lambda: None)
    scene.heard("injected: this rank's code is wrong")
    return scene.resumed(*scene.heard(r"rank 1 of 2 .* failed first"))


def daemon_killed(scene: Scene) -> JobObservation:
    """slurmd of the second node; its step goes on, until SLURM takes the node for lost."""
    scene.submit(Fault(pace_s=5.0))
    scene.until_iteration(5)
    scene.inject(lambda: scene.cluster.kill_node("n2", ranks=False))
    return _after_lost_node(scene, "n2", "TERM: SLURM ends this job")  # who computes misses no daemon


def node_killed(scene: Scene) -> JobObservation:
    """All of the second node; a third one is there."""
    scene.submit(Fault(pace_s=0.5))
    scene.until_iteration(5)
    scene.inject(lambda: scene.cluster.kill_node("n2"))
    return _after_lost_node(scene, "n2", r"node n2 \(rank 1 of 2\) does not answer")


def link_cut(scene: Scene) -> JobObservation:
    """No packet from or to the second node, and no error either."""
    scene.submit(Fault(pace_s=0.5))
    scene.until_iteration(5)
    scene.inject(lambda: scene.cluster.link_down("n2"))
    try:
        line, seconds = scene.heard(r"of 2 .* hangs|n2 .*does not answer|TERM: SLURM ends this job")
        seen = scene.resumed(line, seconds)
    finally:
        scene.cluster.link_up("n2")
    return seen


def _after_lost_node(scene: Scene, name: str, words: str) -> JobObservation:
    line, seconds = scene.heard(words)
    try:
        return scene.resumed(line, seconds)
    finally:
        scene.cluster.start_node(name)
        wait_for_idle(scene, 3)


def wait_for_idle(scene: Scene, nodes: int) -> None:
    """Until that many nodes can take a job again."""
    idle = ("sinfo", "-h", "-p", "train", "-t", "idle", "-o", "%D")
    until(lambda: scene.cluster.run(*idle).stdout.strip() == str(nodes), 60.0)


def preempted(scene: Scene, launcher: str = "srun") -> JobObservation:
    """A job of a partition with precedence takes the nodes, after a grace.

    Ranks that obey SIGTERM before the grace ends make SLURM take the job for ended: it is requeued by us.
    """
    scene.variables = {"LAUNCHER": launcher}
    scene.submit(Fault(pace_s=0.5))
    scene.until_iteration(5)
    urgent = ("--partition", "urgent", "--nodes", "3", "--exclusive", "--output", f"{scene.folder}/urgent")
    scene.inject(lambda: scene.cluster.submit(*urgent, "--wrap", "srun sleep 5", cwd=scene.folder))
    return scene.resumed(*scene.heard("asked to stop"))


def near_its_time_limit(scene: Scene) -> JobObservation:
    """A real limit of 2 minutes, of which SLURM tells the batch shell 60 to 90 s before."""
    scene.sbatch, scene.flags = ("--time", "2", "--signal", "B:USR2@60"), ("--fault.step_timeout_s", "60")
    scene.submit(Fault(pace_s=14.0))
    scene.until_iteration(1)
    scene.inject(lambda: None)
    line, _ = scene.heard("asked to stop", 200.0)
    return scene.resumed(line, None)


def requeued(scene: Scene) -> JobObservation:
    """scontrol requeue."""
    scene.submit(Fault(pace_s=0.5))
    scene.until_iteration(5)
    scene.inject(lambda: scene.cluster.run("scontrol", "requeue", str(scene.job)))
    return scene.resumed(*scene.heard("TERM: SLURM ends this job"))


def damaged_checkpoint(scene: Scene) -> JobObservation:
    """A bit of the newest checkpoint, and then kill -9."""
    scene.submit(Fault(act="wait", iteration=10))
    pid = scene.until_waiting()
    root = folders.checkpoints(scene.run_dir)
    scene.until(lambda: (newest := folders.latest(root)) and folders.iteration_of(newest) == 8, "the save of 8")
    path = next((root / folders.name_of(8)).glob(f"*{DATA}"))
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 4
    path.write_bytes(data)
    scene.inject(lambda: os.kill(pid, signal.SIGKILL))
    again_s = scene.again()
    line, _ = scene.heard("is damaged")
    scene.heard("falling back to")
    scene.end(restarts=1)
    if (weights := scene.weights()) != "equal":
        raise JobCaseFailed(f"final weights: {weights}")
    return JobObservation(printed=line, again_s=again_s, lost=scene.lost(), weights=weights)


def not_a_number(scene: Scene) -> JobObservation:
    """Once, in one microbatch of one rank, as a card that computes wrongly would."""
    scene.submit(Fault(act="nan"))
    scene.until_iteration(5)
    scene.inject(lambda: None)
    return scene.unharmed(*scene.heard("a passing fault of the hardware; first in .*rank 1"))


def replica_changed(scene: Scene) -> JobObservation:
    """A weight of one data-parallel replica."""
    scene.submit(Fault(act="desync"))
    scene.until_iteration(5)
    scene.inject(lambda: None)
    return scene.resumed(*scene.heard("differs between ranks|of rank 1 .* differs"))


def dead_owner(scene: Scene) -> JobObservation:
    """The folder's owner ran on a host that cannot be reached, and left a heartbeat that stands still."""
    scene.submit(Fault(act="raise", every_start=True))
    scene.variables = {"MAX_ATTEMPTS": "1"}
    scene.until_iteration(5)
    scene.cluster.run("scancel", str(scene.job))
    scene.end("CANCELLED")
    record = {"attempt": "0" * 16, "host": "gone", "machine": "elsewhere", "pid": 1, "process_start": 1, "started": 0.0}
    (scene.run_dir / OWNER).write_text(json.dumps(record))
    (scene.folder / "out").unlink()
    scene.flags = ("--fault.start_timeout_s", "120")  # less than the owner is waited for would be a start that hangs
    scene.submit()
    scene.until(lambda: "no heartbeat for" in scene.output(), "waiting for the dead owner")
    scene.inject(lambda: None)
    line, _ = scene.heard("no heartbeat for")
    seconds = scene.until(lambda: 12 in scene.iterations(), "training again")
    seen = scene.unharmed(line, None)
    # No restart of the job: 60 s of silence are what tells a dead owner from a live one.
    return replace(seen, weights=f"{seen.weights}, trained {seconds:.0f} s after that line")


def port_taken(scene: Scene) -> JobObservation:
    """Somebody else listens on the job's MASTER_PORT; the next start has another."""
    scene.submit(hold=True)
    with contextlib.closing(socket.create_server(("", 20000 + scene.job * 7 % 10000))):
        scene.inject(lambda: scene.cluster.run("scontrol", "release", str(scene.job)))
        return scene.resumed(*scene.heard("MASTER_PORT .*is in use"))


def slow_rank(scene: Scene) -> JobObservation:
    """One rank computes several times as long as its peer."""
    scene.submit(Fault(act="slow"))
    scene.until_iteration(1)
    scene.inject(lambda: None)
    line, seconds = scene.heard(r"rank 1 .*computes .*slower")
    return scene.unharmed(line, seconds)


ROWS: Mapping[str, Callable[[Scene], JobObservation]] = {
    **{
        f"kill -9 of rank 1|{PLACES[place][0]}": partial(killed, place=place) for place in PLACES if place != "shutdown"
    },
    "kill -9 of rank 1|shutdown": partial(
        after_the_end, act=partial(_send, signal.SIGKILL), words="rank 1 of 2 .*SIGKILL"
    ),
    "kill -9 of rank 0|step 6": partial(killed, place="step", rank=0),
    "SIGSTOP of rank 1|step 6": stopped,
    **{f"rank 1 waits for ever|{PLACES[place][0]}": partial(hung, place=place) for place in HANGS},
    "rank 1 waits for ever|shutdown": partial(after_the_end, act=lambda _: None, words="rank 1 of 2 .* hangs"),
    "exception on rank 1|step 6": raised,
    "a node's daemon (slurmd) killed|step": daemon_killed,
    "a whole node killed, a spare one there|step": node_killed,
    "a node's link cut|step": link_cut,
    "preemption, 15 s of grace|step": preempted,
    "preemption, under torchrun|step": partial(preempted, launcher="torchrun"),
    "time limit (2 minutes)|step": near_its_time_limit,
    "scontrol requeue|step": requeued,
    "a bit of the newest checkpoint flipped, kill -9|step 10": damaged_checkpoint,
    "NaN once, in one microbatch of rank 1|step 6": not_a_number,
    "a weight of one replica changed|step 6": replica_changed,
    "the folder's owner died on another host|start": dead_owner,
    "MASTER_PORT taken|start": port_taken,
    "rank 1 slow|step": slow_rank,
}
LINKS = ("a node's link cut|step",)
"""Rows that need nodes with links of their own."""
