"""The ``fault`` section of a recipe."""

from dataclasses import dataclass
from typing import Annotated, Literal

from parallel.schema import Infinite

FAILURES_PER_GPU_HOUR = 2e-5
"""Of Llama 3's 405B pretraining: 419 unexpected interruptions in 54 days on 16,384 H100, 1.97e-5 per GPU and hour, one
in 3.1 hours for the whole job (arXiv:2407.21783, section 3.3.4)."""


@dataclass(kw_only=True, slots=True, frozen=True)
class FaultConfig:
    """What is watched for while training, and what is done about it."""

    step_timeout_s: Annotated[float, Infinite] = 600.0
    """Seconds without any progress, in a step, an evaluation or a save, after which a run hangs: every rank leaves
    its stack, one line says which rank stands where, and all end. inf: wait for ever. torch's own timeout cannot tell
    who holds the others up, so it is kept longer than this: parallel.distributed_timeout_minutes is raised to 1.5
    times as much."""

    start_timeout_s: Annotated[float, Infinite] = 1800.0
    """The same until the first step of a process has ended: imports, data, rendezvous, loading, compilation."""

    nonfinite: Literal["stop", "skip"] = "stop"
    """When loss or gradient are NaN or Inf, and again when the same microbatches run again: stop, or skip
    the update. A fault that is gone the second time is said, and training goes on with the good result."""

    spike: Literal["off", "warn", "skip", "rollback", "stop"] = "warn"
    """When loss or gradient norm spike: say so, skip the update too, or stop. rollback: end with exit code 1, so
    that the supervisor or batch script resumes the newest checkpoint, and skip the update of the batch that spiked
    (RUN_DIR/skipped_samples.json)."""

    spike_sigma: float = 6.0
    """Standard deviations above the mean of the last spike_window iterations that make a jump."""

    spike_window: int = 128
    """Iterations that a jump is measured against; nothing is one before half of them are known."""

    replica_check_interval: int = 100
    """Iterations from one comparison of replicas' weights (and before each save) to the next. 0: never."""

    straggler_interval: int = 50
    """Iterations from one comparison of the ranks' speed to the next. 0: never."""

    straggler_ratio: float = 1.3
    """How many times as long as its peers a rank must compute to be named."""

    memory_interval: int = 50
    """Iterations between two checks of each rank's memory. 0: never."""

    memory_growth_mib: float = 256.0
    """MiB by which a rank's memory must have risen steadily, over ten looks or more, to be named."""

    failures_per_gpu_hour: float = FAILURES_PER_GPU_HOUR
    """Failures that end the job, per GPU and hour, by which a run says how often it had better save. The default is
    what Llama 3 saw on 16,384 H100 (arXiv:2407.21783, section 3.3.4). 0: say nothing."""

    def after_watchdog(self, minutes: float) -> float:
        """``parallel.distributed_timeout_minutes``, or so many that the watchdog has spoken before: at most a week."""
        return max(minutes, min(1.5 * self.step_timeout_s / 60, 7 * 24 * 60))

    def problems(self) -> list[str]:
        """What is wrong within this section alone."""
        return self._timeout_problems() + self._watch_problems()

    def _watch_problems(self) -> list[str]:
        least = {
            "spike_sigma": (self.spike_sigma, 1),
            "spike_window": (self.spike_window, 4),
            "replica_check_interval": (self.replica_check_interval, 0),
            "straggler_interval": (self.straggler_interval, 0),
            "straggler_ratio": (self.straggler_ratio, 1.1),
            "memory_interval": (self.memory_interval, 0),
            "memory_growth_mib": (self.memory_growth_mib, 1),
            "failures_per_gpu_hour": (self.failures_per_gpu_hour, 0),
        }
        return [
            f"fault.{name} must be {smallest} or more, found {value}."
            for name, (value, smallest) in least.items()
            if value < smallest
        ]

    def _timeout_problems(self) -> list[str]:
        timeouts = {"step_timeout_s": self.step_timeout_s, "start_timeout_s": self.start_timeout_s}
        return [f"fault.{name} must be above 0, found {value}." for name, value in timeouts.items() if value <= 0]
