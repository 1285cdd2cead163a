"""Expected share of effective training time (goodput), at one size or several."""

import math
from dataclasses import dataclass, fields
from pathlib import Path

from program.errors import UserError
from program.schema import shown
from tools.plan.goodput import model
from tools.plan.goodput.model import simulate
from training.checkpoint.young_daly import CAUSES, FaultTimes, Shares, advised_interval_s, closed_form, mtbf_s
from training.config.small_sections import FAILURES_PER_GPU_HOUR

DAY_S = 86400.0
PUBLISHED = """published, of whole jobs and their own machines:
  97 %    9,600 GPUs, three months, ByteRobust (arXiv:2509.16293)
  > 90 %  16,384 H100, 54 days, Llama 3 405B (arXiv:2407.21783, section 3.3.4)"""

MOST_GPUS = 10**9
MOST = 1e12
"""Of any other number, and the least is its inverse: what no job has, and no arithmetic fails at."""
MOST_FAILURES = 20_000_000


@dataclass(kw_only=True)
class Goodput:
    """Expected share of effective training time (goodput), at one size or several.

    For each size: the interval between saves that is advised (Young, Daly), the share in closed form and by
    simulation, and where the rest goes. Every time is an argument, or comes from where it was measured: a run,
    docs/faults.md.
    """

    num_gpus: tuple[int, ...] = (1024, 16384)
    """GPUs of the job, each of which ends it when it fails."""

    failures_per_gpu_hour: float = FAILURES_PER_GPU_HOUR
    """Failures of any kind that end the job, per GPU and hour; the default is Llama 3's."""

    save_interval_s: float | None = None
    """Seconds of training between two saves. None: as advised for the size."""

    stall_s: float = 5.0
    """Seconds for which a save stops training. Assumed, of a large model; a run prints its own."""

    commit_s: float = 60.0
    """Seconds until a save that is written in the background can be restored. Assumed, of a large model."""

    verdict_s: float = 60.0
    """Seconds from a failure until the job has ended: a killed rank takes 10 at most, a hang 1.5 times
    fault.step_timeout_s. Assumed, a mixture."""

    queueing_s: float = 60.0
    """Seconds until the job runs again. Assumed: SLURM holds a requeued job back for a while, spare nodes are there."""

    restart_s: float = 180.0
    """Seconds until it trains again: imports, rendezvous, loading, the first steps. Assumed, of thousands of ranks."""

    days: float = 1000.0
    """Days to simulate, for a mean that is worth one."""

    seed: int = 0
    """Of the simulated failures."""

    run_dir: Path | None = None
    """A run whose measured stall is taken for stall_s: the median of checkpoint_stall_s in its metrics.jsonl."""

    faults: Path | None = None
    """A docs/faults.md whose measured medians are taken for verdict_s and restart_s, as `python -m tests.faults
    --only jobs` writes it. The one that comes with Triplane is of a small model on two nodes of one machine: a bound
    from below."""

    def times(self, num_gpus: int) -> FaultTimes:
        """Of a job that saves as often as advised unless ``save_interval_s`` says otherwise."""
        between_s = mtbf_s(num_gpus, self.failures_per_gpu_hour)
        return FaultTimes(
            mtbf_s=between_s,
            interval_s=advised_interval_s(self.stall_s, between_s) if self.save_interval_s is None
            else self.save_interval_s,
            stall_s=self.stall_s, commit_s=self.commit_s, verdict_s=self.verdict_s, queueing_s=self.queueing_s,
            restart_s=self.restart_s,
        )  # fmt: skip

    def problems(self) -> list[str]:
        """What is wrong within these flags."""
        found = [
            f"--num_gpus must be 1 to {MOST_GPUS:,}, found {shown(number)}."
            for number in self.num_gpus
            if not 1 <= number <= MOST_GPUS
        ]
        positive = ("failures_per_gpu_hour", "save_interval_s", "days")
        for each in fields(self):
            value = getattr(self, each.name)
            if not isinstance(value, float):
                continue
            if not math.isfinite(value) or value < 0 or (value == 0 and each.name in positive):
                least = "above 0" if each.name in positive else "0 or more"
                found.append(f"--{each.name} must be {least}, found {value}.")
            elif not (value == 0 or 1 / MOST < value < MOST):
                found.append(f"--{each.name} must be between {1 / MOST:g} and {MOST:g}, found {value}.")
        return found

    def endless(self) -> list[str]:
        """Sizes with more failures than can be simulated in minutes."""
        return [
            f"--days {self.days:g}: {number:,} GPUs fail about {failures:.1e} times, at most {MOST_FAILURES:,} can be "
            "simulated. Give fewer days."
            for number in self.num_gpus
            if (failures := self.days * DAY_S / mtbf_s(number, self.failures_per_gpu_hour)) > MOST_FAILURES
        ]

    def hopeless(self) -> list[str]:
        """Sizes at which a restart never ends: exp(R / M) of them are needed."""
        return [
            f"--num_gpus {number}: a failure every {between_s:.3g} s never lets a restart of {self.restart_s:g} s end. "
            "Give fewer GPUs, a lower --failures_per_gpu_hour or a shorter --restart_s."
            for number in self.num_gpus
            if (between_s := mtbf_s(number, self.failures_per_gpu_hour)) * 10 < self.restart_s
        ]


def goodput(job: Goodput) -> None:
    """Print what is expected. Raises UserError for times that no job has."""
    if job.run_dir is not None:
        job.stall_s = model.stall_s(job.run_dir)
    if job.faults is not None:
        job.verdict_s, job.restart_s = model.faults(job.faults)
    if problems := job.problems() or job.hopeless() or job.endless():
        raise UserError("\n".join(problems))
    answer(job)


def answer(job: Goodput) -> None:
    """Print what is expected at each size."""
    print(
        f"a save stops training for {job.stall_s:.3g} s and is committed {job.commit_s:g} s later; verdict "
        f"{job.verdict_s:g} s, queueing {job.queueing_s:g} s, restart {job.restart_s:g} s; "
        f"{job.failures_per_gpu_hour:.3g} failures per GPU and hour"
    )
    for number in job.num_gpus:
        of_size = job.times(number)
        simulated = simulate(of_size, job.days * DAY_S, job.seed)
        print(f"\n{report(number, of_size, closed_form(of_size), simulated, job.days)}")
    print(f"\n{PUBLISHED}")


def report(num_gpus: int, times: FaultTimes, expected: Shares, simulated: Shares, days: float) -> str:
    """What is printed about one size."""
    advised_s = advised_interval_s(times.stall_s, times.mtbf_s)
    given = "" if times.interval_s == advised_s else f" (advised: {_duration(advised_s)})"
    lines = [
        f"{num_gpus:,} GPUs: a failure every {_duration(times.mtbf_s)}, a save every "
        f"{_duration(times.interval_s)}{given}",
        f"  effective training time {expected['training']:.1%} expected, {simulated['training']:.1%} over {days:g} "
        "simulated days; lost to",
    ]
    for cause in CAUSES[1:]:
        lines.append(f"    {cause:<10}{expected[cause]:>7.2%} {simulated[cause]:>7.2%}")
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    """Two digits that matter, in the largest fitting unit."""
    for unit, length in (("days", DAY_S), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"
