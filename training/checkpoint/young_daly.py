"""What failures cost a job, and how often to save for it, by what a save costs."""

import math
from dataclasses import dataclass

SHORTEST_S = 60.0
"""No advice below it: then writing, and not the stall, is what limits."""
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
    commit_s: float = 0.0
    """From the end of the stall until the save can be restored; it is written in the background meanwhile."""
    verdict_s: float = 0.0
    """From the failure until the job has ended."""
    queueing_s: float = 0.0
    """Until it runs again."""
    restart_s: float = 0.0
    """Until it trains again: starting, loading. Failures come in this time, too."""


def mtbf_s(num_gpus: int, failures_per_gpu_hour: float) -> float:
    """Mean seconds between two failures of a job that any GPU's failure ends."""
    rate = num_gpus * failures_per_gpu_hour / 3600
    return 1 / rate if rate > 0 else math.inf


def advised_interval_s(stall_s: float, mtbf_s: float) -> float:
    """Seconds of training between two saves that lose the least time.

    With d the stall of a save and M the mean time between failures, Young's sqrt(2 d M) (J. W. Young, "A first order
    approximation to the optimum checkpoint interval", CACM 17(9), 1974) with Daly's higher-order terms (J. T. Daly, "A
    higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006, equation 37):
    sqrt(2 d M) (1 + x / 3 + x^2 / 9) - d, where x = sqrt(d / 2M); M itself where d is 2M or more.
    """
    if math.isinf(mtbf_s):
        return math.inf
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    x = math.sqrt(stall_s / (2 * mtbf_s))
    return max(SHORTEST_S, math.sqrt(2 * stall_s * mtbf_s) * (1 + x / 3 + x * x / 9) - stall_s)


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


def advice(interval_s: float, iterations: int, stall_s: float, mtbf_s: float, least_gain: float) -> str | None:
    """A sentence where another interval would win at least ``least_gain`` of the time, else None.

    interval_s, iterations: between two saves as they are; stall_s: how long training stood still for one.
    """
    better_s = advised_interval_s(stall_s, mtbf_s)
    if math.isinf(better_s) or interval_s <= 0:
        return None
    now, then = (_lost_to_saves(each_s, stall_s, mtbf_s) for each_s in (interval_s, better_s))
    if now - then < least_gain:
        return None
    better = max(1, round(iterations * better_s / interval_s))
    return (
        f"advice: a checkpoint every {better_s / 60:.3g} minutes (checkpoint.save_interval = {better}) would lose "
        f"{then:.1%} of the time, every {interval_s / 60:.3g} minutes loses {now:.1%}: a save stops training for "
        f"{stall_s:.2f} s, and a failure is expected every {mtbf_s / 3600:.3g} hours (fault.failures_per_gpu_hour)"
    )


def _lost_to_saves(interval_s: float, stall_s: float, mtbf_s: float) -> float:
    """Of all time, what saves and the work since the last one cost together: about d / t + t / 2M."""
    return 1 - closed_form(FaultTimes(mtbf_s=mtbf_s, interval_s=interval_s, stall_s=stall_s))["training"]
