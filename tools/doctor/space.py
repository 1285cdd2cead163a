"""Free bytes and free names in the run's folder and in the temporary one."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools.doctor.context import DoctorContext
from tools.doctor.finding import Finding, NodeCheck, Status, judged
from training.checkpoint.room import nearest

GROUP = "space"
GIB = 2**30
TEMPORARY_GIB = 2.0
"""Compiled kernels and sockets; a full /tmp ends jobs in odd ways."""
FILES = 10_000
"""Names that a run may need: a checkpoint has a few files per rank."""


def check_node(situation: DoctorContext) -> NodeCheck:
    """Wrong below a tenth of what is asked for, a warning below it."""
    findings = []
    if situation.run_dir is not None:
        findings += _folder("run_dir", situation.run_dir, situation.free_gib, "make room, or use another --run_dir")
    temporary = Path(tempfile.gettempdir())
    return NodeCheck(
        findings=[*findings, *_folder("temporary folder", temporary, TEMPORARY_GIB, "make room, or set TMPDIR")]
    )


def _folder(check: str, folder: Path, wanted_gib: float, fix: str) -> list[Finding]:
    there = os.statvfs(nearest(folder))
    free, total = (blocks * there.f_frsize / GIB for blocks in (there.f_bavail, there.f_blocks))
    digits = 0 if free >= 10 else 2
    found = f"{{:,.{digits}f}} GiB free of {{:,.{digits}f}} GiB in {nearest(folder)}"
    findings = [_judged(check, free, wanted_gib, found, f"{wanted_gib:g} GiB free", fix, (free, total))]
    if there.f_files:  # 0: this file system has no limit of names
        millions = there.f_favail > 1e6
        found = "{:,.1f} million more files" if millions else "{:,.0f} more files"
        numbers = [there.f_favail / 1e6 if millions else float(there.f_favail)]
        findings.append(_judged(f"{check}: inodes", there.f_favail, FILES, found, f"{FILES:,}", fix, numbers))
    return findings


def _judged(
    check: str, free: float, wanted: float, found: str, expected: str, fix: str, numbers: Sequence[float]
) -> Finding:
    if free >= wanted:
        return judged(GROUP, check, "ok", found, setting=True, numbers=numbers)
    status: Status = "warning" if free >= wanted / 10 else "wrong"
    return judged(GROUP, check, status, found, expected, fix, setting=True, numbers=numbers)
