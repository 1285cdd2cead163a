"""Free bytes and free names in the run's folder and in the temporary one."""

import os
import tempfile
from pathlib import Path

from tools.doctor.context import DoctorContext
from tools.doctor.finding import Finding, NodeCheck, Status
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
    status = _status(free, wanted_gib)
    digits = 0 if free >= 10 else 2
    findings = [
        Finding(
            group=GROUP,
            check=check,
            status=status,
            found=f"{{:,.{digits}f}} GiB free of {{:,.{digits}f}} GiB in {nearest(folder)}",
            numbers=(free, total),
            expected="" if status == "ok" else f"{wanted_gib:g} GiB free",
            fix="" if status == "ok" else fix,
            fault="setting",
        )
    ]
    if there.f_files:  # 0: this file system has no limit of names
        findings += _names(check, there.f_favail, fix)
    return findings


def _names(check: str, free: int, fix: str) -> list[Finding]:
    status = _status(free, FILES)
    return [
        Finding(
            group=GROUP,
            check=f"{check}: inodes",
            status=status,
            found="{:,.1f} million more files" if free > 1e6 else "{:,.0f} more files",
            numbers=(free / 1e6 if free > 1e6 else float(free),),
            expected="" if status == "ok" else f"{FILES:,}",
            fix="" if status == "ok" else fix,
            fault="setting",
        )
    ]


def _status(free: float, wanted: float) -> Status:
    if free >= wanted:
        return "ok"
    return "warning" if free >= wanted / 10 else "wrong"
