"""What failures cost a job, in closed form."""

import math
import random
import statistics
from dataclasses import dataclass
from pathlib import Path

from parallel.errors import UserError
from parallel.untrusted import read_text
from training.checkpoint.young_daly import advised_interval_s, mtbf_s
from training.metrics.jsonl import read_jsonl

CAUSES = ("training", "stall", "lost work", "verdict", "queueing", "restart")
"""What all of a job's time goes into; only the first is effective."""

Shares = dict[str, float]
"""By cause; they sum to 1."""


@dataclass(kw_only=True, slots=True, frozen=True)
class FaultTimes:
    """How long each part of a fault takes, and how often there is one."""

    mtbf_s: float
    """Mean seconds between failures of the job; they come independently of one another."""
    interval_s: float
    """Seconds of training between two saves."""
    stall_s: float
    """For which a save stops training."""
    commit_s: float
    """From the end of the stall until the save can be restored; it is written in the background meanwhile."""
    verdict_s: float
    """From the failure until the job has ended."""
    queueing_s: float
    """Until it runs again."""
    restart_s: float
    """Until it trains again: starting, loading. Failures come in this time, too."""


def times(
    num_gpus: int,
    failures_per_gpu_hour: float,
    *,
    interval_s: float | None,
    stall_s: float,
    commit_s: float,
    verdict_s: float,
    queueing_s: float,
    restart_s: float,
) -> FaultTimes:
    """The times of a job of ``num_gpus`` that saves as often as advised unless ``interval_s`` says otherwise."""
    between_s = mtbf_s(num_gpus, failures_per_gpu_hour)
    return FaultTimes(
        mtbf_s=between_s,
        interval_s=advised_interval_s(stall_s, between_s) if interval_s is None else interval_s,
        stall_s=stall_s,
        commit_s=commit_s,
        verdict_s=verdict_s,
        queueing_s=queueing_s,
        restart_s=restart_s,
    )


def closed_form(times: FaultTimes) -> Shares:
    """Expected shares for failures that come exponentially, with mean M.

    Saves are committed c + k w after a start, where w is interval + stall and c the time to commit. A start fails
    after t, which is exponential, so it commits sum_k P(t > c + k w) = exp(-(w + c) / M) / (1 - exp(-w / M)) saves;
    what it did since is lost. A restart of length R takes M (exp(R / M) - 1) in the mean, those that fail included,
    after exp(R / M) verdicts. With c = 0 this is Daly's M exp(R / M) (exp(w / M) - 1) per interval (FGCS 22(3), 2006).
    """
    mean, cycle = times.mtbf_s, times.interval_s + times.stall_s
    saves = math.exp(-(cycle + times.commit_s) / mean) / -math.expm1(-cycle / mean)
    tries = math.exp(times.restart_s / mean)
    spent = {
        "training": saves * times.interval_s,
        "stall": saves * times.stall_s,
        "lost work": mean - saves * cycle,
        "verdict": tries * times.verdict_s,
        "queueing": tries * times.queueing_s,
        "restart": mean * math.expm1(times.restart_s / mean),
    }
    total = sum(spent.values())
    return {cause: spent[cause] / total for cause in CAUSES}


# ---- what failures cost a job, one after the other


def simulate(times: FaultTimes, duration_s: float, seed: int) -> Shares:
    """Shares over ``duration_s`` of a job whose failures come exponentially; the same seed gives the same failures.

    What was trained and is not yet saved when the time is over counts as trained.
    """
    draw, spent, now_s = random.Random(seed), dict.fromkeys(CAUSES, 0.0), 0.0
    while True:
        until_failure_s = draw.expovariate(1 / times.mtbf_s)
        if now_s + until_failure_s >= duration_s:
            _train(spent, times, duration_s - now_s)
            break
        _train_in_vain(spent, times, until_failure_s)
        _recover(spent, times, draw)
        now_s = sum(spent.values())
        if now_s >= duration_s:
            break
    total = sum(spent.values())
    return {cause: spent[cause] / total for cause in CAUSES}


def _train(spent: Shares, times: FaultTimes, lasted_s: float) -> None:
    """Time that no failure ended."""
    saves, rest_s = divmod(lasted_s, times.interval_s + times.stall_s)
    stalled_s = saves * times.stall_s + max(0.0, rest_s - times.interval_s)
    spent["stall"] += stalled_s
    spent["training"] += lasted_s - stalled_s


def _train_in_vain(spent: Shares, times: FaultTimes, lasted_s: float) -> None:
    """A start that failed: what was committed counts, the rest is to be done again."""
    cycle_s = times.interval_s + times.stall_s
    saves = max(0, math.floor((lasted_s - times.commit_s) / cycle_s))
    spent["training"] += saves * times.interval_s
    spent["stall"] += saves * times.stall_s
    spent["lost work"] += lasted_s - saves * cycle_s


def _recover(spent: Shares, times: FaultTimes, draw: random.Random) -> None:
    """From a failure until training goes on, over restarts that fail themselves."""
    again = True
    while again:
        until_failure_s = draw.expovariate(1 / times.mtbf_s)
        again = until_failure_s < times.restart_s
        spent["verdict"] += times.verdict_s
        spent["queueing"] += times.queueing_s
        spent["restart"] += min(until_failure_s, times.restart_s)


# ---- times that were measured: of a run's saves, and of the faults that ``make faults`` injected


VERDICT, AGAIN = "To verdict, s", "To training, s"
"""Columns of docs/faults.md, as tests/faults/jobs.py writes them."""


def stall_s(run_dir: Path) -> float:
    """The median stall of a run's saves. Raises UserError where it tells of none."""
    path = run_dir / "metrics.jsonl"
    try:
        stalls = [float(line["checkpoint_stall_s"]) for line in read_jsonl(path) if "checkpoint_stall_s" in line]
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}. Give a run's folder as --run_dir, or --stall_s.") from None
    if not stalls:
        raise UserError(f"{path}: no iteration with checkpoint_stall_s. Give --stall_s, or a run that has saved.")
    return statistics.median(stalls)


def faults(document: Path) -> tuple[float, float]:
    """Medians, in seconds, of what transient faults took until they were reported and until the job trained again.

    Raises UserError where ``document``, the docs/faults.md of a cluster, has no such table.
    """
    try:
        lines = read_text(document).splitlines()
    except OSError as error:
        raise UserError(f"--faults {document}: {error.strerror}.") from None
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines if line.startswith("| ")]
    head = next((row for row in rows if {VERDICT, AGAIN} <= set(row)), None)
    medians = []
    for name in (VERDICT, AGAIN):
        at = head.index(name) if head else 0
        found = [row[at] for row in rows if head and len(row) == len(head) and row[0].startswith("transient: ")]
        numbers = [float(text) for text in found if text.replace(".", "", 1).isdigit()]
        if not numbers:
            raise UserError(
                f'--faults {document}: no transient fault with "{name}". python -m tests.faults --only jobs writes it.'
            )
        medians.append(statistics.median(numbers))
    return medians[0], medians[1]
