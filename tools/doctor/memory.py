"""Memory, shared memory and limits of processes."""

import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from tools.doctor.context import DoctorContext
from tools.doctor.finding import Finding, NodeCheck, NodeFacts, judged, shares_of_median
from tools.doctor.infiniband import ROOT as INFINIBAND

GROUP = "memory"
GIB = 2**30
SHM = Path("/dev/shm")
SHM_GIB = 2.0
"""Checkpoints are copied into shared memory while training goes on; Docker gives a container 64 MiB."""
OPEN_FILES = 4096
LOW_SHARE = 0.9


def check_node(situation: DoctorContext) -> NodeCheck:
    """Facts: "total_gib"."""
    memory = psutil.virtual_memory()
    total, free = memory.total / GIB, memory.available / GIB
    found, numbers = "{:.0f} GiB available of {:.0f} GiB", (free, total)
    main = judged(GROUP, "main memory", "ok", found, numbers=numbers)
    if free <= 0.5 * total:
        fix = "see who uses it: other jobs, leftover processes, files in /dev/shm"
        main = judged(GROUP, "main memory", "warning", found, "more than half", fix, numbers=numbers)
    findings = [main, *_shared(), *_locked(), *_files(), *_cluster(total, situation)]
    return NodeCheck(findings=findings, facts={"total_gib": total})


def compare(seen: Sequence[NodeFacts]) -> list[tuple[str, Finding]]:
    """A warning for nodes with less memory than the others."""
    totals = {one.node: one.facts[GROUP]["total_gib"] for one in seen if one.facts.get(GROUP)}
    return [
        (node, judged(GROUP, "main memory between nodes", "warning", f"{totals[node]:.0f} GiB", "as on most nodes"))
        for node, share in shares_of_median(totals).items()
        if share < LOW_SHARE
    ]


def _cluster(total_gib: float, situation: DoctorContext) -> Iterator[Finding]:
    cluster = situation.cluster
    if cluster and total_gib < LOW_SHARE * cluster.node.memory_gib:
        wanted = f"{cluster.node.memory_gib:.0f} GiB ({cluster.name})"
        yield judged(
            GROUP, "main memory of the cluster", "warning", f"{total_gib:.0f} GiB", wanted, "a module is missing?"
        )


def _shared() -> Iterator[Finding]:
    if not SHM.is_dir():
        yield judged(GROUP, "shared memory", "not checked", f"no {SHM}")
        return
    size, free = psutil.disk_usage(str(SHM)).total / GIB, psutil.disk_usage(str(SHM)).free / GIB
    if free >= SHM_GIB:
        found = f"{{:.0f}} GiB free of {{:.0f}} GiB in {SHM}"
        yield judged(GROUP, "shared memory", "ok", found, setting=True, numbers=(free, size))
        return
    found = f"{{:.2f}} GiB free of {{:.2f}} GiB in {SHM}"
    expected = f"room for a node's share of the optimizer's state, at least {SHM_GIB:.0f} GiB"
    fix = "docker run --shm-size, or checkpoint.async_save = false"
    yield judged(GROUP, "shared memory", "warning", found, expected, fix, setting=True, numbers=(free, size))


def _locked() -> Iterator[Finding]:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    reported = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit // 1024} KiB"
    needed = INFINIBAND.is_dir() and any(INFINIBAND.iterdir())
    if limit == resource.RLIM_INFINITY or not needed:
        yield judged(
            GROUP, "locked memory", "ok", reported if needed else f"{reported} (InfiniBand alone needs unlimited)"
        )
        return
    fix = "ulimit -l unlimited; under SLURM LimitMEMLOCK=infinity for slurmd"
    yield judged(GROUP, "locked memory", "wrong", reported, "unlimited, for InfiniBand", fix, setting=True)


def _files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= OPEN_FILES or soft == resource.RLIM_INFINITY:
        yield judged(GROUP, "open files", "ok", f"{soft} per process")
        return
    fix = f"ulimit -n {hard}" if hard > soft else "raise nofile in limits.conf, or LimitNOFILE for slurmd"
    yield judged(GROUP, "open files", "warning", f"{soft} per process", f"{OPEN_FILES} or more", fix, setting=True)
