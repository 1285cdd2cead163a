"""Examine this machine, or all nodes of a job, before training.

    python -m tools.doctor                                                     this machine, a few seconds
    srun --ntasks-per-node=1 python -m tools.doctor --nodes --run_dir DIR      the nodes of an allocation

A line per check: ok, a warning, WRONG, or not checked and why; with what was found, what was expected, and the fix.
Exit codes, of the first node: 0 fine (warnings included), 1 something is wrong, 2 bad usage. The other nodes end with
0, or with 1 if they did not reach the first one.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from program import command
from program.errors import UserError
from program.flags import number_problems, parse_flags
from tools import clusters
from tools.doctor import examine, report
from tools.doctor.context import DoctorContext, situation
from tools.doctor.deadline import Deadline
from tools.doctor.node import GROUPS
from tools.doctor.tcp_rendezvous import MeetingError
from tools.shared.written import check_file, is_list_of_nodes, write_file
from training.config.recipe import did_you_mean

BAD_NODES = "--bad_nodes", is_list_of_nodes, ("bad_nodes.*",)
"""Where their names may go, for ``tools.shared.written``."""


@dataclass(kw_only=True)
class Doctor:
    """What to examine, and where to write what was found."""

    nodes: bool = False
    """All nodes of this job step: one process on each, started by srun or torchrun. Else this machine alone."""
    run_dir: Path | None = None
    """The run's folder: is it shared, fast enough, with the operations that checkpoints need? Written to: doctor/."""
    cluster: str | None = None
    """Compare cards and fabric with slurm/clusters/NAME.toml. Else nodes are compared with each other."""
    bad_nodes: Path | None = None
    """Write the names of nodes to exclude to this file, one a line; empty when there are none."""
    json: Path | None = None
    """Write all findings to this file, as JSON."""
    only: tuple[str, ...] = ()
    """Groups of checks to run, by their names in the report."""
    skip: tuple[str, ...] = ()
    """Groups to leave out."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """cpu: skip the GPU checks."""
    free_gib: float = 10.0
    """Free space that run_dir should have, GiB: less is a warning, less than a tenth of it is WRONG."""
    meeting_s: float = 60.0
    """How long to wait for a node before it is named as missing, seconds."""
    time_limit_s: float = 240.0
    """Seconds for the whole examination; checks that it cuts off are reported as not checked."""

    def groups(self) -> tuple[str, ...]:
        """The groups to check. Raises UserError for an unknown name."""
        for flag, names in (("only", self.only), ("skip", self.skip)):
            for name in names:
                if name not in GROUPS:
                    near = did_you_mean(name, list(GROUPS))
                    raise UserError(f"--{flag} {name}: unknown.{near} Expected some of: {', '.join(GROUPS)}.")
        return tuple(name for name in GROUPS if name not in self.skip and (not self.only or name in self.only))

    def problems(self) -> list[str]:
        """What is wrong with the numbers."""
        numbers = {"free_gib": self.free_gib, "meeting_s": self.meeting_s, "time_limit_s": self.time_limit_s}
        found = [f"--{name} must be above 0, found {value}." for name, value in numbers.items() if value <= 0]
        return number_problems(self) + found


def main(
    argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None, clock: Callable[[], float] = time.time
) -> int:
    """The exit code."""
    job = parse_flags(Doctor, argv, "python -m tools.doctor", __doc__)
    began = time.monotonic()
    try:
        if job.problems():
            raise UserError(" ".join(job.problems()))
        if job.bad_nodes:
            check_file(job.bad_nodes, *BAD_NODES)
        if job.json:
            check_file(job.json, *report.PLACE)
        groups = job.groups()
        cluster = clusters.load(job.cluster) if job.cluster else None
        environ = os.environ if environ is None else environ
        here = situation(job.nodes, environ, job.device, job.run_dir, job.free_gib, cluster, clock)
        if here is None:
            return 0  # a node needs one process; this is a further one
        if here.nodes > 1 and here.master is None:
            raise UserError("--nodes: expected MASTER_ADDR and MASTER_PORT; export the first node's, and a free port.")
    except UserError as error:
        print(f"doctor: {error}", file=sys.stderr)
        return 2
    return _examine(job, here, groups, began)


def _examine(job: Doctor, here: DoctorContext, groups: Sequence[str], began: float) -> int:
    deadline = Deadline(job.time_limit_s)
    if here.rank:
        try:
            examine.other(here, groups, deadline, job.meeting_s)
            return 0
        except MeetingError as error:
            print(f"doctor: {here.node}: the first node ({here.name_of(0)}) was not met: {error}", file=sys.stderr)
            return 1
    if here.nodes == 1:
        result = examine.alone(here, groups, deadline)
    else:
        result = examine.first(here, groups, deadline, job.meeting_s)
    seconds = time.monotonic() - began
    report.show(result, here, seconds, sys.stdout)
    try:
        if job.bad_nodes:
            job.bad_nodes.parent.mkdir(parents=True, exist_ok=True)
            write_file(job.bad_nodes, "".join(f"{node}\n" for node in result.bad).encode(), *BAD_NODES)
        if job.json:
            report.write_json(job.json, result, here, seconds)
    except OSError as error:
        print(f"doctor: {error.filename}: cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    return result.code


if __name__ == "__main__":
    code = command.run("tools.doctor", main)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a call that never returned would hold the interpreter back
