"""What failures cost a job, in closed form."""

import math
from dataclasses import dataclass

from training.checkpoint.young_daly import advised_interval_s, mtbf_s

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
