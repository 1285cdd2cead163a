"""How often to save, by what a save costs and how often something fails."""

import math

SHORTEST_S = 60.0
"""No advice below it: then writing, and not the stall, is what limits."""


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


def share_lost(interval_s: float, stall_s: float, mtbf_s: float) -> float:
    """Of all time, what saves and the work since the last one cost together, to first order: d / t + t / 2M."""
    cycle_s = interval_s + stall_s
    return min(1.0, stall_s / cycle_s + cycle_s / (2 * mtbf_s))


def advice(interval_s: float, iterations: int, stall_s: float, mtbf_s: float, least_gain: float) -> str | None:
    """A sentence where another interval would win at least ``least_gain`` of the time, else None.

    interval_s, iterations: between two saves as they are; stall_s: how long training stood still for one.
    """
    better_s = advised_interval_s(stall_s, mtbf_s)
    if math.isinf(better_s) or interval_s <= 0:
        return None
    now, then = share_lost(interval_s, stall_s, mtbf_s), share_lost(better_s, stall_s, mtbf_s)
    if now - then < least_gain:
        return None
    better = max(1, round(iterations * better_s / interval_s))
    return (
        f"advice: a checkpoint every {better_s / 60:.3g} minutes (checkpoint.save_interval = {better}) would lose "
        f"{then:.1%} of the time, every {interval_s / 60:.3g} minutes loses {now:.1%}: a save stops training for "
        f"{stall_s:.2f} s, and a failure is expected every {mtbf_s / 3600:.3g} hours (fault.failures_per_gpu_hour)"
    )
