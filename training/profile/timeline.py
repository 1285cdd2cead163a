"""Every so many iterations one step is measured: who computed when, how large the pipeline's bubble was, and what
share of the step collectives took that nothing overlapped.

Costs such a step, on each rank that takes part: two readings of the clock (on a GPU, two CUDA events) for each pass and
each collective, and behind the step one wait for its end and one small all-gather, whose numbers rank 0 waits for.
"""

import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from parallel.groups import Ranks
from training.loop import Callback
from training.metrics.jsonl import JsonlSink
from training.metrics.rates import WARMUP_ITERATIONS
from training.metrics.values import Value, Values
from training.profile.clock import Measured, StepClock, waits_of_shards
from training.profile.files import timeline_path
from training.profile.ranges import StepRanges
from training.profile.spans import KINDS, RankTimeline, StepSpan, from_zero, pipeline_bubble
from training.progress import Progress
from training.step import StepResult

MOST_RANKS = 16
"""Of a job in which all ranks take part; of a larger one, rank 0's pipeline alone does: one rank a stage."""
_HEAD = 4
"""Numbers of a rank before its spans, of which each has five."""


class TimelineCallback(Callback):
    """Measures, gathers on rank 0, writes a line of timeline.jsonl, and is a meter (metrics/meters.py) of two metrics.

    To stand before all that computes between steps, such as evaluation, and before the recorder.
    """

    def __init__(self, interval: int, run_dir: Path, steps: StepRanges, ranks: Ranks) -> None:
        self.interval, self.steps, self.ranks = interval, steps, ranks
        self.path = timeline_path(run_dir)
        everyone = ranks.layout.world_size <= MOST_RANKS
        self.group = None if everyone else ranks.pgs.pp
        self.takes_part = everyone or (ranks.at.dp, ranks.at.cp, ranks.at.tp) == (0, 0, 0)
        self.clock: StepClock | None = None
        self.newest: dict[str, Value] = {}
        self.steps_begun = 0
        """In this start: its first ones, which compile and allocate, are drawn and not logged."""
        self._installed = contextlib.ExitStack()
        self._sink: JsonlSink | None = None

    def before_step(self, progress: Progress) -> None:
        self.steps_begun += 1
        if self.takes_part and (progress.iteration + 1) % self.interval == 0:
            self.clock = StepClock(self.steps.chunks, self.ranks.device)
            self.steps.add(self.clock)
            self._installed.enter_context(waits_of_shards(self.clock))

    def after_step(self, progress: Progress, result: StepResult) -> None:
        if self.clock is None:
            return
        clock, self.clock = self.clock, None
        self._installed.close()
        self.steps.remove(clock)
        rows = self._gathered(_numbers(clock.read()))
        if self.ranks.rank == 0:
            self._report(progress, rows.tolist())

    def report(self) -> Mapping[str, Value]:
        """Of the newest timeline, once. On rank 0; no communication."""
        newest, self.newest = self.newest, {}
        return newest

    def stop(self, progress: Progress, reason: str) -> None:
        if self._sink is not None:
            self._sink.close()

    def _gathered(self, own: Sequence[float]) -> torch.Tensor:
        """fp64 [ranks, numbers], in order of rank."""
        on_gpu = self.ranks.device.type == "cuda"
        mine = torch.tensor(own, dtype=torch.float64, pin_memory=on_gpu).to(self.ranks.device, non_blocking=True)
        count = dist.get_world_size(self.group)
        table = torch.empty(count * len(own), dtype=torch.float64, device=self.ranks.device)
        dist.all_gather_into_tensor(table, mine, group=self.group)
        return table.view(count, len(own))

    def _report(self, progress: Progress, rows: Sequence[Sequence[float]]) -> None:
        one_host = self.ranks.identity.local_world_size == self.ranks.identity.world_size
        timelines = from_zero([self._timeline(number, row, one_host) for number, row in enumerate(rows)])
        if self.steps_begun > WARMUP_ITERATIONS:
            self.newest = {"exposed_communication": sum(row[2] for row in rows) / sum(row[1] for row in rows)}
            if self.ranks.layout.pp > 1:
                self.newest["pipeline_bubble"] = pipeline_bubble(self._pipelines(timelines).values())
        if self._sink is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._sink = JsonlSink(self.path, self.ranks.say)
        line: dict[str, Any] = {"ranks": [{"rank": one.rank, "pp": one.pp, "spans": one.spans} for one in timelines]}
        self._sink.write(progress.iteration, cast(Values, line))

    def _timeline(self, number: int, row: Sequence[float], one_host: bool) -> RankTimeline:
        """By a clock of all: of the host that they share, or since the moment at which all ranks knew the loss."""
        rank = number if self.group is None else dist.get_global_rank(self.group, number)
        shift = row[0] if one_host else 0.0
        return RankTimeline(rank=rank, pp=self.ranks.layout.coordinates(rank).pp, spans=tuple(_spans(row, shift)))

    def _pipelines(self, timelines: Sequence[RankTimeline]) -> dict[Any, list[Sequence[StepSpan]]]:
        """The ranks of each, in order of stage."""
        found = defaultdict[Any, list[Sequence[StepSpan]]](list)
        for one in timelines:
            found[self.ranks.layout.coordinates(one.rank)._replace(pp=0)].append(one.spans)
        return found


def _numbers(measured: Measured | None) -> list[float]:
    """As many on every rank: all have the same passes, and at most one reduction and one update."""
    measured = measured or Measured()
    passes = sum(span.kind == "forward" for span in measured.spans)
    spans = [
        [KINDS.index(span.kind), _or_minus(span.microbatch), _or_minus(span.chunk), span.begin_s, span.end_s]
        for span in measured.spans
    ]
    spans += [[-1.0] * 5] * (2 * passes + 2 - len(spans))
    head = [measured.known_at_s, measured.step_s, measured.exposed_s, passes]
    assert len(head) == _HEAD and len(spans) == 2 * passes + 2
    return head + [number for span in spans for number in span]


def _or_minus(number: int | None) -> int:
    return -1 if number is None else number


def _number(value: float) -> int | None:
    return int(value) if value >= 0 else None


def _spans(row: Sequence[float], shift: float) -> list[StepSpan]:
    """Back from ``_numbers``."""
    found = []
    for at in range(_HEAD, len(row), 5):
        kind, microbatch, chunk, begin, end = row[at : at + 5]
        if kind >= 0:
            found.append(StepSpan(KINDS[int(kind)], _number(microbatch), _number(chunk), begin + shift, end + shift))
    return found
