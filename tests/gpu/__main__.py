"""Prove on a machine with one or more GPUs what no CPU can show; write it as JSON and as a page, and print a table.

python -m tests.gpu [--minutes 20] [--subjects specs throughput] [--size tiny] [--resume]

Each subject has a process and a limit of its own: one that crashes or hangs is reported, and the next is run. No
network is used. Send the two files back.
"""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from parallel import command, launch
from parallel.flags import parse_flags
from tests.gpu.report import Report
from tests.gpu.runner import Budget, Subject, not_run, run_subject, without_time
from tests.gpu.sizes import SizeName
from tests.gpu.table import SUBJECTS, SubjectName
from tools.benchmark.circumstances import ROOT
from tools.shared.written import check_place


@dataclass(kw_only=True)
class ProveGpu:
    """Prove Triplane on GPUs."""

    subjects: tuple[SubjectName, ...] = get_args(SubjectName)
    """What to prove, in the table's order; environment always comes first. docs/benchmarks.md says what each shows."""

    minutes: float = 20.0
    """Of the whole script. A subject that would not fit is reported as not run; above 20, each may take longer."""

    size: SizeName = "card"
    """card: models that fill the card. tiny: a try of everything in toy sizes, whose times mean nothing."""

    resume: bool = False
    """Continue today's JSON of the same cards and commit: what has passed there is kept, and not run again."""

    output: Path = ROOT / "docs/benchmarks"
    """Folder for gpu-NAME-DATE.json and .html."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: every subject passed or cannot be tried here; 1: one failed; 2: no GPU."""
    began = time.monotonic()
    job = parse_flags(ProveGpu, argv, "python -m tests.gpu", __doc__)
    if not launch.count_gpus(os.environ):
        return refused("no GPU was found here: nothing is proved. Run it on a machine with one or more NVIDIA GPUs.")
    check_place(job.output / "gpu.json", "--output")
    chosen = [subject for subject in SUBJECTS if subject.name in ("environment", *job.subjects)]
    return prove(job, chosen, Budget(total_s=60 * job.minutes, began=began))


def prove(job: ProveGpu, chosen: Sequence[Subject], budget: Budget) -> int:
    """Every subject in turn; all is written after each, so that nothing is lost.

    Nothing is written where no driver answers: what an emulated device shows (tests/gpu_path) is not a card's.
    """
    report = Report(folder=job.output, size=job.size, minutes=job.minutes)
    for number, subject in enumerate(chosen):
        if report.has_passed(subject.name):
            print(f"{subject.name}: passed before ({report.path})", flush=True)
            continue
        if number and not report.machine:
            report.add(subject, not_run("the machine is not known: environment failed"))
            continue
        limit_s = budget.limit_s(subject, chosen[number + 1 :])
        if limit_s is None:
            report.add(subject, not_run(without_time(subject, budget.left_s())))
            continue
        print(f"{subject.name} (at most {limit_s:.0f} s) ...", flush=True)
        try:
            record = run_subject(subject, report.machine, job.size, report.subjects, limit_s)
        except KeyboardInterrupt:
            report.end(budget)
            raise
        if number == 0 and record["exit_code"] == 2:
            return refused(record["problems"][0])
        if number == 0 and "machine" in record["numbers"]:
            report.know(record["numbers"]["machine"], resume=job.resume)
        report.add(subject, record)
    report.end(budget)
    return report.exit_code


def refused(message: str) -> int:
    """No GPU, or none that torch can use."""
    print(f"tests.gpu: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(command.run("tests.gpu", main))
