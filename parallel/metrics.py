"""A number of the program's own among the run's metrics, by one line wherever it arises:

    metrics.record("attention/max_logit", logits.max(), reduce="max")

It is reduced over microbatches, iterations and ranks, and logged with the next line of metrics.jsonl and the other
sinks. What runs without gradients does not count (evaluation, the first of the two forward passes of recomputed
activations), nor does a step that is replayed. Costs a small kernel per call; ranks wait for each other once per line.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

Reduction = Literal["mean", "sum", "max", "min"]
LONGEST_NAME = 200
Metric = tuple[str, Reduction]
Kept = tuple[Tensor, int]
"""Sum of the values, or with max and min the largest and smallest, fp64 []; and their number."""


class MetricCollector:
    """What ``record`` has brought since the last report; reductions run on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.step: dict[Metric, Kept] = {}
        """Of the step that runs, which may be replayed."""
        self.steps: dict[Metric, Kept] = {}
        self.known: list[Metric] = []
        """On every rank the same."""

    def commit(self) -> None:
        """The step that ran counts."""
        for metric, kept in self.step.items():
            _merge(self.steps, metric, kept)
        self.step = {}

    def report(self) -> dict[str, float]:
        """Each metric since the last report, over all ranks; one that no rank has recorded since is left out.

        Collective: a reduction of one number, two of a few more once there are metrics, a gather for new names. Raises
        ValueError, on every rank, for a name with two reductions.
        """
        self.commit()
        fresh = torch.tensor(float(not self.steps.keys() <= {*self.known}), device=self.device)
        dist.all_reduce(fresh)
        if fresh:
            everyones: list[list[Metric]] = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(everyones, list(self.steps))
            self.known = sorted({*self.known, *(metric for metrics in everyones for metric in metrics)})
            if len(dict(self.known)) < len(self.known):
                raise ValueError(f"metrics.record: a name has two reductions: {self.known}")
        if not self.known:
            return {}
        packed = torch.stack([self._packed(metric) for metric in self.known])
        sums, extremes = packed[:, :2].contiguous(), packed[:, 2].contiguous()
        dist.all_reduce(sums)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        self.steps = {}
        values = {}
        for (name, reduce), (total, count), extreme in zip(self.known, sums.tolist(), extremes.tolist(), strict=True):
            if count:
                values[name] = {"mean": total / count, "sum": total, "max": extreme, "min": -extreme}[reduce]
        return values

    def _packed(self, metric: Metric) -> Tensor:
        """fp64 [3]: total and count, which are summed over ranks, and what the largest is taken of."""
        if metric not in self.steps:
            return torch.tensor([0.0, 0.0, -torch.inf], dtype=torch.float64, device=self.device)
        total, count = self.steps[metric]
        total = total.to(self.device)
        return torch.stack([total, torch.full_like(total, count), -total if metric[1] == "min" else total])


def _merge(into: dict[Metric, Kept], metric: Metric, kept: Kept) -> None:
    if metric in into:
        both = {"max": torch.maximum, "min": torch.minimum}.get(metric[1], torch.add)
        kept = both(into[metric][0], kept[0]), into[metric][1] + kept[1]
    into[metric] = kept


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
    """Keep a value, of one element, for the metric ``name``. mean: over all ranks' calls, each weighing the same.

    Raises ValueError for what is none, also where nothing is kept.
    """
    where = f"metrics.record({str(name)[:100]!r}, ...)"
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        raise ValueError(f"{where}: expected a name of 1 to {LONGEST_NAME} printable characters")
    if reduce not in get_args(Reduction):
        raise ValueError(f"{where}: expected reduce to be one of {', '.join(get_args(Reduction))}, found {reduce!r}")
    try:
        tensor = torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{where}: expected a number, found {type(value).__name__}") from None
    if tensor.numel() != 1 or tensor.is_complex():
        raise ValueError(f"{where}: expected one real number, found {tensor.dtype} of shape {list(tensor.shape)}")
    if _collector is not None and torch.is_grad_enabled():
        _merge(_collector.step, (name, reduce), (tensor.to(torch.float64).reshape(()), 1))


def begin_step() -> None:
    """What was recorded before counts; what comes is of a step that may be replayed."""
    if _collector is not None:
        _collector.commit()


def discard_step() -> None:
    """The step that ran does not count: its microbatches run again."""
    if _collector is not None:
        _collector.step = {}
