"""A number of the program's own among the run's metrics, by one line wherever it arises:

    metrics.record("attention/max_logit", logits.max(), reduce="max")

It is reduced over microbatches, iterations and ranks, and logged with the next line of metrics.jsonl and the other
sinks. What runs without gradients does not count (evaluation, the first of the two forward passes of recomputed
activations), nor does a step that is replayed. Costs a small kernel per call; ranks wait for each other once per line.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

Reduction = Literal["mean", "sum", "max", "min"]


@dataclass(kw_only=True, slots=True, frozen=True)
class RecordedMetric:
    """One metric's values so far: fp64 [], on their device."""

    reduce: Reduction
    total: Tensor
    """Their sum; with max and min their largest and smallest."""
    count: int

    def merge(self, other: "RecordedMetric") -> "RecordedMetric":
        """Both together. Raises ValueError where one name has two reductions."""
        if self.reduce != other.reduce:
            raise ValueError(f"a metric is recorded with reduce={self.reduce!r} and with reduce={other.reduce!r}")
        both = {"max": torch.maximum, "min": torch.minimum}.get(self.reduce, torch.add)
        return replace(self, total=both(self.total, other.total), count=self.count + other.count)


class MetricCollector:
    """What ``record`` has brought since the last report; reductions run on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.step: dict[str, RecordedMetric] = {}
        """Of the step that runs, which may be replayed."""
        self.steps: dict[str, RecordedMetric] = {}
        self.known: list[tuple[str, Reduction]] = []
        """On every rank the same."""

    def add(self, name: str, metric: RecordedMetric) -> None:
        """A value of the step that runs."""
        self.step[name] = self.step[name].merge(metric) if name in self.step else metric

    def commit(self) -> None:
        """The step that ran counts."""
        for name, metric in self.step.items():
            self.steps[name] = self.steps[name].merge(metric) if name in self.steps else metric
        self.step = {}

    def report(self) -> dict[str, float]:
        """Each metric since the last report, over all ranks; one that no rank has recorded since is left out.

        Collective: a reduction of one number, two of a few more once there are metrics, a gather for new names.
        """
        self.commit()
        mine = [(name, metric.reduce) for name, metric in self.steps.items()]
        fresh = torch.tensor(float(not {*mine} <= {*self.known}), device=self.device)
        dist.all_reduce(fresh)
        if fresh:
            everyones: list[list[tuple[str, Reduction]]] = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(everyones, mine)
            self.known = sorted({*self.known, *(entry for entries in everyones for entry in entries)})
        if not self.known:
            return {}
        packed = torch.stack([self._packed(name, reduce) for name, reduce in self.known])
        sums, extremes = packed[:, :2].contiguous(), packed[:, 2].contiguous()
        dist.all_reduce(sums)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        self.steps = {}
        values = {}
        for (name, reduce), (total, count), extreme in zip(self.known, sums.tolist(), extremes.tolist(), strict=True):
            if count:
                found = {"mean": total / count, "sum": total, "max": extreme, "min": -extreme}
                values[name] = found[reduce]
        return values

    def _packed(self, name: str, reduce: Reduction) -> Tensor:
        """fp64 [3]: total and count, which are summed over ranks, and what the largest is taken of."""
        metric = self.steps.get(name)
        if metric is None:
            return torch.tensor([0.0, 0.0, -torch.inf], dtype=torch.float64, device=self.device)
        total = metric.total.to(self.device)
        return torch.stack([total, torch.full_like(total, metric.count), -total if reduce == "min" else total])


_collector: MetricCollector | None = None
"""Of this process, while a run trains. The one state that is not passed on: so a metric costs its author one line."""


@contextmanager
def collecting(device: torch.device) -> Iterator[MetricCollector]:
    """While open, ``record`` keeps what it is given."""
    global _collector
    before, _collector = _collector, MetricCollector(device)
    try:
        yield _collector
    finally:
        _collector = before


def record(name: str, value: Tensor | float, reduce: Reduction = "mean") -> None:
    """Keep a value, of one element, for the metric ``name``. mean: over all ranks' calls, each weighing the same."""
    if _collector is None or not torch.is_grad_enabled():
        return
    total = torch.as_tensor(value).detach().to(torch.float64).reshape(())
    _collector.add(name, RecordedMetric(reduce=reduce, total=total, count=1))


def begin_step() -> None:
    """What was recorded before counts; what comes is of a step that may be replayed."""
    if _collector is not None:
        _collector.commit()


def discard_step() -> None:
    """The step that ran does not count: its microbatches run again."""
    if _collector is not None:
        _collector.step = {}
