"""What failures cost a job, one after the other."""

import math
import random

from tools.plan.goodput.model import CAUSES, FaultTimes, Shares


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
