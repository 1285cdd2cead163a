"""A job over failures drawn at random, and times that were measured."""

import math
import random
import statistics
from pathlib import Path

from program.errors import UserError
from program.untrusted import read_text
from training.checkpoint.young_daly import CAUSES, FaultTimes, Shares
from training.metrics.jsonl import read_jsonl


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
