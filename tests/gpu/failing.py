"""Subjects that fail, each in its way: what the runner must survive (test_prove_gpu.py)."""

import os
import time
from functools import partial
from pathlib import Path

from tests.gpu.subject_run import SubjectRun, UnrunError


def crash(run: SubjectRun) -> None:
    """The process is gone, as after a fault of the driver."""
    run.say("half of it")
    run.note("half", 0.5)
    os._exit(134)


def hang(run: SubjectRun) -> None:
    """A child of it sleeps on."""
    run.say("before the hang")
    os.system("sleep 300 & echo $! > $HANGING_CHILD")
    time.sleep(300)


def run_out_of_memory(run: SubjectRun) -> None:
    """As torch says it."""
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def try_nothing(run: SubjectRun) -> None:
    """Something is missing here."""
    raise UnrunError("transformer-engine is not installed")


def succeed(run: SubjectRun) -> None:
    """With a number that JSON does not have."""
    run.note("difference", float("nan"))
    run.say("12 passed")


def have_no_time(run: SubjectRun) -> None:
    """For one of its parts; another fails."""
    run.part("long", lambda: None, least_s=1e6)
    run.part("short", lambda: run.say("short: done"))


def know_a_card(run: SubjectRun) -> None:
    """An environment that a test has made up."""
    run.note("machine", {
        "date": "2026-11-24T12:00:00+00:00", "commit": "abc", "gpus": ["NVIDIA H200"], "capability": [9, 0],
        "memory_gib": 139.0, "driver": "580", "cuda": "13.0", "nccl": [2, 29, 7],
        "versions": {"torch": "2.13.0", "transformer-engine": "2.19.0"},
    })  # fmt: skip


def know_no_card(run: SubjectRun) -> None:
    """The process ends before the machine is known."""
    os._exit(1)


def have_rows(run: SubjectRun) -> None:
    """Three, which count how often they were run; the second fails while a variable says so."""
    run.numbers["rows"] = {}
    for name in ("first", "second", "third"):
        run.part(name, partial(one_row, run, name))


def one_row(run: SubjectRun, name: str) -> None:
    """A line and a number."""
    with Path(os.environ["ROWS_RUN"]).open("a") as log:
        log.write(f"{name}\n")
    run.numbers["rows"][name] = {"of": name}
    run.say(f"{name}: measured")
    if name == os.environ.get("FAILING_ROW"):
        run.problem(f"{name}: too far off")
    if name == os.environ.get("HANGING_ROW"):
        time.sleep(300)
