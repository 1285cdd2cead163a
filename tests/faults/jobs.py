"""Faults under jobs of a real SLURM: what is said, how long it takes, what is lost, and whether the bits are the same.

Rows lie in job_transient, job_degraded and job_operator; a case is a row.
"""

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from data.config import DataConfig
from data.prepare import prepare
from tests.faults import job_degraded, job_operator, job_transient
from tests.faults.job_scene import (
    FLAGS,
    START_TIMEOUT_S,
    STEP_TIMEOUT_S,
    JobCaseFailed,
    JobObservation,
    Scene,
    Undisturbed,
    digests,
    facts,
)
from tests.faults.job_transient import LINKS
from tests.faults.private_cluster import PrivateCluster, running_cluster
from tests.faults.private_links import links_possible
from tests.faults.results import CaseResult, Store
from training.checkpoint import folders

CAMPAIGN = "jobs"
KILL_LEVEL_S, AGAIN_LEVEL_S = 10.0, 30.0
TITLE = "Jobs of a SLURM cluster"
TEXT = f"""`sbatch slurm/pretrain.sbatch` on a private cluster of three nodes (Debian's SLURM, several slurmd on one
host; for the cut link, network namespaces): two nodes, one rank each, DP 2, a checkpoint every 4 of 12 iterations,
`fault.step_timeout_s` {STEP_TIMEOUT_S:.0f}, `fault.start_timeout_s` {START_TIMEOUT_S:.0f}. "To verdict" is from the
injection until the words are printed, "to training" from when SLURM says that the job runs again until its first new
iteration, imports and, in its rows, the doctor included. Transient faults must end, by themselves, with the bits of a
run that was not disturbed in weights and moments, and no process may be left. A kill must be reported within
{KILL_LEVEL_S:.0f} s, a hang within 1.5 times its timeout; training must go on within {AGAIN_LEVEL_S:.0f} s, but for the
doctor's rows. Two take longer by their nature: a killed slurmd, which no rank misses and SLURM alone notices, and an
owner on another host, taken for dead after 60 s of silence."""
COLUMNS = {
    "printed": "Printed",
    "verdict_s": "To verdict, s",
    "again_s": "To training, s",
    "lost": "Iterations lost",
    "weights": "Final weights",
}

Play = Callable[[Scene], JobObservation]
SECTIONS: Mapping[str, Mapping[str, Play]] = {
    "transient": job_transient.ROWS,
    "degraded": job_degraded.ROWS,
    "operator": job_operator.ROWS,
}
ROWS: Mapping[str, Play] = {f"{name}: {row}": play for name, rows in SECTIONS.items() for row, play in rows.items()}


def cases(count: int) -> list[str]:
    """The first ``count`` rows."""
    return list(ROWS)[:count]


def run(todo: Sequence[str], store: Store, scratch: Path, report: Callable[[], None]) -> None:
    """Each row in a folder of its own, one after the other."""
    cache_dir = scratch / "cache"
    prepare(DataConfig(tokenizer="byte", cache_dir=str(cache_dir)), lambda _: None)
    linked = [case for case in todo if case.partition(": ")[2] in LINKS]
    undisturbed: Undisturbed | None = None
    for chosen, links in (([case for case in todo if case not in linked], False), (linked, True)):
        if not chosen:
            continue
        if links and not links_possible():
            for case in chosen:
                store.add(
                    _result(
                        case, JobObservation(printed="not injected: this machine has no network namespaces"), 0.0, ""
                    )
                )
            continue
        with cluster(scratch / f"cluster{links}", links) as running:
            undisturbed = undisturbed or alone(running, scratch, cache_dir)
            for number, case in enumerate(chosen):
                folder = scratch / f"case{links}{number}"
                store.add(
                    one(case, Scene(cluster=running, folder=folder, cache_dir=cache_dir, undisturbed=undisturbed))
                )
                report()


@contextlib.contextmanager
def cluster(folder: Path, links: bool) -> Iterator[PrivateCluster]:
    """Three nodes."""
    folder.mkdir()
    with running_cluster(folder, nodes=3, cpus_per_node=4, links=links) as running:
        yield running


def alone(running: PrivateCluster, scratch: Path, cache_dir: Path) -> Undisturbed:
    """The undisturbed run, through the same script."""
    nothing = Undisturbed(digests={}, losses={})
    scene = Scene(cluster=running, folder=scratch / "undisturbed", cache_dir=cache_dir, undisturbed=nothing)
    scene.submit()
    scene.end(restarts=0)
    newest = folders.latest(folders.checkpoints(scene.run_dir))
    if newest is None:
        raise JobCaseFailed(f"the undisturbed run has no checkpoint; flags {FLAGS}; printed: {scene.output()[-1500:]}")
    return Undisturbed(digests=digests(newest), losses=scene.losses())


def one(case: str, scene: Scene) -> CaseResult:
    """Play a row and look whether all was as it must be."""
    began, missing = time.monotonic(), _missing(case)
    seen, problem = JobObservation(printed=missing), ""
    try:
        if not missing:
            seen = play(case, scene)
    except Exception as error:  # of this row; the others are still worth playing
        problem = str(error) if isinstance(error, JobCaseFailed) else f"{type(error).__name__}: {error}"
    return _result(case, seen, time.monotonic() - began, problem or too_slow(case, seen))


def play(case: str, scene: Scene) -> JobObservation:
    """A row; nothing is left of it. Raises Wrong where what was seen is not what had to be seen."""
    try:
        return ROWS[case](scene)
    finally:
        scene.cluster.run("scancel", str(scene.job))
        shutil.rmtree(scene.folder, ignore_errors=True)


def _missing(case: str) -> str:
    needed = job_operator.NEEDS.get(case.partition(": ")[2])
    return f"not injected: {needed} is not installed" if needed and not needed.exists() else ""


def too_slow(case: str, seen: JobObservation) -> str:
    """Which level was not kept; empty: all were."""
    level_s = float("inf")
    if "SIGSTOP" in case or "for ever" in case or "link" in case:
        level_s = 1.5 * (START_TIMEOUT_S if "data" in case else STEP_TIMEOUT_S)
    elif "kill -9" in case or "whole node" in case:
        level_s = KILL_LEVEL_S
    if (seen.verdict_s or 0.0) > level_s:
        return f"reported after {seen.verdict_s:.1f} s, the level is {level_s:.0f} s"
    if (seen.again_s or 0.0) > AGAIN_LEVEL_S and "doctor" not in case:
        return f"training again after {seen.again_s:.1f} s, the level is {AGAIN_LEVEL_S:.0f} s"
    return ""


def _result(case: str, seen: JobObservation, seconds: float, problem: str) -> CaseResult:
    kind = case.partition("|")[0]
    columns = {"phase": case.partition("|")[2], **facts(seen)}
    return CaseResult(
        campaign=CAMPAIGN, case=case, kind=kind, outcome=seen.weights, seconds=seconds, problem=problem, facts=columns
    )


def table(results: Sequence[CaseResult]) -> list[str]:
    """Of docs/faults.md: a line for each row."""
    lines = ["| Injected | Phase | " + " | ".join(COLUMNS.values()) + " |", "|---" * (2 + len(COLUMNS)) + "|"]
    for result in results:
        values = [result.facts.get(name, "–") for name in COLUMNS]
        lines.append(f"| {result.kind} | {result.facts['phase']} | " + " | ".join(values) + " |")
    return lines
