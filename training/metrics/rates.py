"""How fast a run goes: durations of iterations -> tokens per second, MFU, time left."""

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from training.metrics.console import duration

WARMUP_ITERATIONS = 2
"""After a start or a resume these do not count: they compile, allocate and open connections."""

MEDIAN_OVER = 101
"""Iterations whose median gives the time left: recent enough to follow a batch ramp-up."""


@dataclass(kw_only=True)
class Rates:
    """Times iterations on one rank. What lies between them (evaluation, saving) is left out."""

    world_size: int
    flops_per_token: float | None = None
    """Model FLOPs to train on one token (models/costs/flops.py), without recomputation."""
    hardware_flops_per_token: float | None = None
    """The same with recomputed activations; None where it is not known."""
    peak_flops_per_gpu: float | None = None
    """Dense peak of one GPU for the data type in use [FLOP/s]; None where it is unknown, and on a CPU."""
    clock: Callable[[], float] = time.monotonic
    """Seconds that never step back: with the time of day, a clock that is set would give negative rates."""

    total_s: float = field(default=0.0, init=False)
    """What all iterations took since the start, the first ones too."""

    _began: float = field(default=0.0, init=False)
    _warmup_left: int = field(default=WARMUP_ITERATIONS, init=False)
    _warmup_times_s: list[float] = field(default_factory=list, init=False)
    _times_s: list[float] = field(default_factory=list, init=False)
    _tokens: int = field(default=0, init=False)
    _recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=MEDIAN_OVER), init=False)

    def begin(self) -> None:
        """An iteration begins, with the wait for its data."""
        self._began = self.clock()

    def end(self, tokens: int) -> None:
        """It has ended; ``tokens`` is what the whole global batch held."""
        elapsed_s = self.clock() - self._began
        self.total_s += elapsed_s
        if self._warmup_left:
            self._warmup_left -= 1
            self._warmup_times_s.append(elapsed_s)
            return
        self._times_s.append(elapsed_s)
        self._recent_s.append(elapsed_s)
        self._tokens += tokens

    def report(self, remaining_iterations: int) -> dict[str, float]:
        """The numbers since the last report, by their key in metrics.jsonl; starts a new interval.

        ``iteration_s`` is the mean, the rates are tokens over time (not means of rates, which would favour
        short iterations) and ``eta_s`` is the recent median times what remains.
        An interval of warm-up alone has ``iteration_s`` and nothing else.
        """
        times_s, warmup_times_s, tokens = self._times_s, self._warmup_times_s, self._tokens
        self._times_s, self._warmup_times_s, self._tokens = [], [], 0
        if not times_s:
            return {"iteration_s": statistics.fmean(warmup_times_s)} if warmup_times_s else {}
        return {
            "iteration_s": statistics.fmean(times_s),
            **self._throughput(tokens / max(sum(times_s), 1e-9)),
            "eta_s": statistics.median(self._recent_s) * remaining_iterations,
        }

    def time_left(self, remaining_iterations: int) -> str:
        """ ", ETA 1m 25s" from the recent median; nothing before the first iteration that counts."""
        if not self._recent_s:
            return ""
        return f", ETA {duration(statistics.median(self._recent_s) * remaining_iterations)}"

    def _throughput(self, tokens_per_s: float) -> dict[str, float]:
        per_gpu = tokens_per_s / self.world_size
        values = {"tokens_per_s": tokens_per_s, "tokens_per_s_per_gpu": per_gpu}
        if self.flops_per_token is not None:
            values["tflops_per_gpu"] = per_gpu * self.flops_per_token / 1e12
        if self.peak_flops_per_gpu is not None:
            if self.flops_per_token is not None:
                values["mfu"] = per_gpu * self.flops_per_token / self.peak_flops_per_gpu
            if self.hardware_flops_per_token is not None:
                values["hfu"] = per_gpu * self.hardware_flops_per_token / self.peak_flops_per_gpu
        return values
