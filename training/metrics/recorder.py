"""The callback that turns steps into logged numbers. Measured on every rank, written by rank 0.

What each rank has of its own is gathered once a logged line, and made one as the registry says.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import torch

from parallel.groups import Ranks
from training.batches import BatchStream
from training.health.stragglers import gathered_rows
from training.loop import Callback
from training.metrics import node
from training.metrics.console import duration
from training.metrics.meters import Meter
from training.metrics.nvml import GpuSensor
from training.metrics.rates import Rates
from training.metrics.registry import METRICS
from training.metrics.sinks import Sinks
from training.metrics.values import Value
from training.progress import Progress
from training.step import StepResult

HOLDERS = {"memory_gib": "memory_rank", "gpu_temperature_c": "gpu_temperature_rank"}
"""Metric -> the one that says which rank its largest value is of."""


class RankSensors:
    """Memory of this rank's device and process, its GPU by NVML, and, on one rank of a node, the node's network."""

    def __init__(self, ranks: Ranks) -> None:
        self.cuda = ranks.device if ranks.device.type == "cuda" else None
        self.gpu = GpuSensor(str(torch.cuda.get_device_properties(self.cuda).uuid)) if self.cuda else None
        self.network = node.Network() if ranks.identity.local_rank == 0 else None

    def read(self) -> dict[str, float]:
        """The same names on every rank; NaN where this rank has no value."""
        values = node.memory()
        values |= self.network.read() if self.network else dict.fromkeys(node.Network.NAMES, math.nan)
        if self.gpu is not None:
            values["memory_gib"] = torch.cuda.max_memory_allocated(self.cuda) / 2**30
            values |= self.gpu.read()
        return values


def across_ranks(own: Mapping[str, float], ranks: Ranks) -> dict[str, Value]:
    """Each metric over all ranks, by its reduction in the registry; NaN does not count, and what is NaN everywhere is
    left out. own: the same names on every rank. Collective: one all-gather of a number per name and rank; waits."""
    rows = gathered_rows(list(own.values()), ranks)
    return reduced(dict(zip(own, zip(*rows, strict=True), strict=True)))


def reduced(by_rank: Mapping[str, Sequence[float]]) -> dict[str, Value]:
    """Name -> one value from those of all ranks, in the order of ranks."""
    values: dict[str, Value] = {}
    for name, column in by_rank.items():
        if known := [one for one in column if not math.isnan(one)]:
            values[name] = REDUCE[METRICS[name].reduce](known)
            if name in HOLDERS:
                values[HOLDERS[name]] = column.index(max(known))
    return values


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


REDUCE: dict[str, Callable[[Sequence[float]], float]] = {"mean": _mean, "sum": math.fsum, "max": max, "min": min}


class Recorder(Callback):
    """Writes one set of numbers per ``log_interval`` iterations, with the keys of docs/metrics.md."""

    def __init__(
        self,
        ranks: Ranks,
        log_interval: int,
        train_iters: int,
        tokens_of: Callable[[int], int],
        rates: Rates,
        sinks: Sinks | None,
        stream: BatchStream,
        meters: Sequence[Meter],
    ) -> None:
        """stream: the training data, whose waiting and whose progress is logged. tokens_of: tokens of the first so
        many samples."""
        self.ranks, self.log_interval, self.train_iters, self.tokens_of = ranks, log_interval, train_iters, tokens_of
        self.rates, self.sinks, self.stream, self.meters = rates, sinks, stream, meters
        self.sensors = RankSensors(ranks)
        self.waited_s, self.stalled_s, self.skipped, self.all_waited_s = 0.0, 0.0, 0, 0.0
        self.unwritten: StepResult | None = None

    def before_step(self, progress: Progress) -> None:
        self.rates.begin()

    def after_step(self, progress: Progress, result: StepResult) -> None:
        self.rates.end(result.tokens)
        self.waited_s += self.stream.data_wait_s
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
            "consumed_tokens": self.tokens_of(progress.consumed_samples),
            "checkpoint_stall_s": self.stalled_s,
            "skipped": self.skipped,
        }
        positions = result.samples * self.stream.seq_length
        if result.tokens < positions:
            values["masked"] = 1 - result.tokens / positions
        sources = self.stream.sources()
        for name, read in sources.items():
            values["epoch" if len(sources) == 1 else f"epoch/{name}"] = read.epochs
            if len(sources) > 1:
                values[f"tokens/{name}"] = read.samples * self.stream.seq_length
        if result.decoupled_learning_rate is not None:
            values["decoupled_learning_rate"] = result.decoupled_learning_rate
        if result.grad_norm is not None:
            values["grad_norm"] = result.grad_norm
        if result.loss_scale != 1.0:
            values["loss_scale"] = result.loss_scale
        return values | self.rates.report(self.train_iters - progress.iteration)


def is_logged(iteration: int, log_interval: int, train_iters: int) -> bool:
    """Whether this iteration has a line: the first, every ``log_interval``-th, and the last one."""
    return iteration == 1 or iteration % log_interval == 0 or iteration >= train_iters
