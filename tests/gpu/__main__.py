"""Prove on a machine with one or more GPUs what no CPU can show; write it as JSON and as a page, and print a table.

python -m tests.gpu [--minutes 20] [--subjects specs throughput] [--only bf16] [--size tiny] [--resume]
python -m tests.gpu --slices speed --output FOLDER --resume

Each subject has a process of its own: one that crashes or hangs is reported, and the others are run. No network is
used, nor git, a virtual environment or an installation of this project: PYTHONPATH may say where megatron-core and
other packages lie. Send the two files back.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from parallel import launch
from program import command
from program.flags import parse_flags
from tests.benchmarks.circumstances import ROOT
from tests.gpu import processes
from tests.gpu.rank import MEASUREMENTS
from tests.gpu.report import Report
from tests.gpu.runner import Budget, Subject, not_run, side_by_side
from tests.gpu.sizes import SizeName
from tests.gpu.slices import SLICES, SliceName
from tests.gpu.table import SUBJECTS, SubjectName
from tools.shared.written import check_place

MINUTES = 20.0
IMPORTED = ("training.train", *(f"tests.gpu.{name}" for name in MEASUREMENTS))


@dataclass(kw_only=True)
class ProveGpu:
    """Prove Triplane on GPUs."""

    subjects: tuple[SubjectName, ...] = ()
    """What to prove, in the table's order; empty: everything. environment always comes first. docs/benchmarks.md says
    what each shows."""

    slices: tuple[SliceName, ...] = ()
    """Named sets of subjects that fit a machine which is there for minutes (docs/benchmarks.md)."""

    only: tuple[str, ...] = ()
    """Rows to run, by name or pattern ("fp8*"), also those that have passed; empty: all. --resume keeps the others.
    Subjects without rows are run whole."""

    minutes: float | None = None
    """Of the whole script, shared by what is chosen: 20, or what the slices need. A subject that would not fit is
    reported as not run."""

    size: SizeName = "card"
    """card: models that fill the card. tiny: a try of everything in toy sizes, whose times mean nothing."""

    toy_first: bool = False
    """Try each subject that measures in toy size before, all at the same time: one that fails there gets no time."""

    resume: bool = False
    """Continue the newest JSON of the same cards and libraries in --output: rows that passed are kept, and not run
    again."""

    output: Path = ROOT / "docs/benchmarks"
    """Folder for gpu-NAME-DATE.json and .html. Without --resume no file that is there is replaced."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: every subject passed or cannot be tried here; 1: one failed; 2: no GPU."""
    began = time.monotonic()
    job = parse_flags(ProveGpu, argv, "python -m tests.gpu", __doc__)
    if not launch.count_gpus(os.environ):
        return refused("no GPU was found here: nothing is proved. Run it on a machine with one or more NVIDIA GPUs.")
    check_place(job.output / "gpu.json", "--output")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was found until then is written
    return prove(job, chosen(job), Budget(total_s=60 * minutes(job), began=began))


def chosen(job: ProveGpu) -> list[Subject]:
    """In the table's order."""
    names = {*job.subjects, *(name for one in job.slices for name in SLICES[one].subjects)} or set(
        get_args(SubjectName)
    )
    return [subject for subject in SUBJECTS if subject.name in {"environment", *names}]


def minutes(job: ProveGpu) -> float:
    """Of the whole script."""
    return job.minutes or sum(SLICES[one].minutes for one in job.slices) or MINUTES


def prove(job: ProveGpu, subjects: Sequence[Subject], budget: Budget) -> int:
    """Those that measure neither time nor memory side by side, the others in turn; all is written after each.

    Nothing is written where no driver answers: what an emulated device shows (tests/gpu_path) is not a card's.
    """
    report = Report(folder=job.output, size=job.size, minutes=budget.total_s / 60)
    first, *others = subjects
    try:
        for _, record in run_all([first], job, report, budget, others):
            if record["exit_code"] == 2:
                return refused(record["problems"][0])
            if "machine" in record["numbers"]:
                report.know(record["numbers"]["machine"], resume=job.resume)
            report.add(first, record)
        if report.machine:
            if problem := processes.preload(IMPORTED):
                print(
                    f"processes are started one by one, none can be forked: {problem}",
                    flush=True,
                )
            prove_others(job, [one for one in others if not is_done(one, job, report)], report, budget)
        for subject in others if not report.machine else ():
            report.add(subject, not_run("the machine is not known: environment failed"))
    finally:
        if report.subjects:
            report.end(budget)
    return report.exit_code


def prove_others(job: ProveGpu, subjects: Sequence[Subject], report: Report, budget: Budget) -> None:
    """In batches: within one all are run at the same time."""
    failed = toys(job, [subject for subject in subjects if subject.timed], report, budget) if job.toy_first else {}
    left_out = [subject for subject in subjects if subject.name in failed]
    for subject in left_out:
        report.add(subject, not_run(f"it failed in toy size: {failed[subject.name]}"))
    batches = batched([subject for subject in subjects if subject not in left_out], together=job.size == "tiny")
    for number, batch in enumerate(batches):
        following = [subject for later in batches[number + 1 :] for subject in later]
        for subject, record in run_all(batch, job, report, budget, following):
            report.add(subject, record)


def batched(subjects: Sequence[Subject], *, together: bool) -> list[list[Subject]]:
    """First those that are not timed, at once, then one by one those that are. together: all that read no other's
    record, at once."""
    at_once = [each for each in subjects if not each.reads and (together or not each.timed)]
    return [*([at_once] if at_once else []), *([each] for each in subjects if each not in at_once)]


def run_all(
    batch: Sequence[Subject], job: ProveGpu, report: Report, budget: Budget, following: Sequence[Subject]
) -> Any:
    """Each subject of a batch with its record, as it ends."""

    def task(subject: Subject) -> dict[str, Any]:
        known = {name: record for name, record in report.subjects.items() if name in subject.reads}
        own = {"before": report.before.get(subject.name, {}), "only": job.only}
        return {"machine": report.machine, "size": job.size, "earlier": known} | own

    at_once = max(1, (os.cpu_count() or 1) // 2)
    return side_by_side(batch, task, lambda subject: budget.limit_s(subject, following), at_once)


def toys(job: ProveGpu, subjects: Sequence[Subject], report: Report, budget: Budget) -> dict[str, str]:
    """Of those that failed in toy size, their first problem."""
    print("in toy size, all at the same time:", flush=True)
    toy = ProveGpu(size="tiny")
    of_toys = Report(folder=job.output, size="tiny", minutes=job.minutes or MINUTES, machine=report.machine)
    for batch in batched(subjects, together=True):
        for subject, record in run_all(batch, toy, of_toys, budget, subjects):
            of_toys.add(subject, record)
    found = of_toys.subjects.items()
    return {name: record["problems"][0] for name, record in found if record["verdict"] == "failed"}


def is_done(subject: Subject, job: ProveGpu, report: Report) -> bool:
    """All of it has passed in the report that is continued."""
    record = report.before.get(subject.name)
    done = bool(record and record["verdict"] == "passed" and not record["late"] and not job.only)
    if done:
        print(f"{subject.name}: passed before ({report.path})", flush=True)
    return done


def refused(message: str) -> int:
    """No GPU, or none that torch can use."""
    print(f"tests.gpu: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(command.run("tests.gpu", main))
