"""The callback that turns steps into logged numbers. Measured on every rank, written by rank 0."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

from data.prepared import SourceProgress
from parallel.groups import Ranks
from training.loop import Callback
from training.metrics.across_ranks import RankSensors, across_ranks
from training.metrics.console import duration
from training.metrics.meters import Meter
from training.metrics.rates import Rates
from training.metrics.sinks import Sinks
from training.metrics.values import Value
from training.progress import Progress
from training.step import StepResult


class Recorder(Callback):
    """Writes one set of numbers per ``log_interval`` iterations, with the keys of docs/metrics.md."""

    def __init__(
        self,
        ranks: Ranks,
        log_interval: int,
        train_iters: int,
        seq_length: int,
        rates: Rates,
        sinks: Sinks | None,
        data_wait_s: Callable[[], float],
        meters: Sequence[Meter],
        sources: Callable[[], Mapping[str, SourceProgress]] = dict,
    ) -> None:
        """sources: how far each source of data has been read, by its name."""
        self.ranks, self.log_interval, self.train_iters, self.seq_length = ranks, log_interval, train_iters, seq_length
        self.rates, self.sinks, self.data_wait_s, self.meters = rates, sinks, data_wait_s, meters
        self.sources, self.sensors = sources, RankSensors(ranks)
        self.waited_s, self.stalled_s, self.skipped, self.all_waited_s = 0.0, 0.0, 0, 0.0
        self.unwritten: StepResult | None = None

    def before_step(self, progress: Progress) -> None:
        self.rates.begin()

    def after_step(self, progress: Progress, result: StepResult) -> None:
        self.rates.end(result.tokens)
        self.waited_s += self.data_wait_s()
        self.skipped += result.skipped
        self.unwritten = result
        if is_logged(progress.iteration, self.log_interval, self.train_iters):
            self._write(progress, result)
        else:
            left = self.train_iters - progress.iteration
            self.ranks.show_progress(f"iteration {progress.iteration}/{self.train_iters}{self.rates.time_left(left)}")

    def _write(self, progress: Progress, result: StepResult) -> None:
        measured = across_ranks({"data_wait_s": self.waited_s, **self.sensors.read()}, self.ranks)
        self.all_waited_s += cast(float, measured["data_wait_s"])
        for meter in self.meters:
            measured |= meter.report()
        if self.sinks is not None:
            own = self._values(progress, result)
            if taken := own.keys() & measured.keys():
                raise ValueError(f"metrics.record: {', '.join(sorted(taken))}: every line has a number of that name")
            self.sinks.write(progress.iteration, own | measured)
        self.waited_s, self.stalled_s, self.skipped, self.unwritten = 0.0, 0.0, 0, None

    def after_save(self, progress: Progress, path: Path, stall_s: float) -> None:
        self.stalled_s += stall_s

    def evaluation(self, iteration: int, figures: Mapping[str, float]) -> None:
        """Validation losses, or scores of tasks, by metric: a line of their own."""
        if self.sinks is not None:
            self.sinks.write(iteration, figures)

    def stop(self, progress: Progress, reason: str) -> None:
        if self.unwritten is not None:  # stopped between two logged iterations
            self._write(progress, self.unwritten)
        if self.rates.total_s >= 1:  # of less, a share says nothing
            share = self.all_waited_s / self.rates.total_s
            self.ranks.say(f"waited for data {share:.3%} of the iterations' {duration(self.rates.total_s)}")

    def close(self) -> None:
        """Wait for the sinks, which may be slow: once everything else of the run is safe."""
        if self.sinks is not None:
            self.sinks.close()

    def _values(self, progress: Progress, result: StepResult) -> dict[str, Value]:
        values: dict[str, Value] = {
            "time_s": time.time(),
            "loss": result.loss,
            "learning_rate": result.learning_rate,
            "batch_size": result.samples,
            "consumed_samples": progress.consumed_samples,
            "consumed_tokens": progress.consumed_samples * self.seq_length,
            "checkpoint_stall_s": self.stalled_s,
            "skipped": self.skipped,
        }
        sources = self.sources()
        for name, read in sources.items():
            values["epoch" if len(sources) == 1 else f"epoch/{name}"] = read.epochs
            if len(sources) > 1:
                values[f"tokens/{name}"] = read.samples * self.seq_length
        if result.grad_norm is not None:
            values["grad_norm"] = result.grad_norm
        if result.loss_scale != 1.0:
            values["loss_scale"] = result.loss_scale
        return values | self.rates.report(self.train_iters - progress.iteration)


def is_logged(iteration: int, log_interval: int, train_iters: int) -> bool:
    """Whether this iteration has a line: the first, every ``log_interval``-th, and the last one."""
    return iteration == 1 or iteration % log_interval == 0 or iteration >= train_iters
