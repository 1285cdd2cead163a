"""Every so many iterations one step is measured: who computed when, how large the pipeline's bubble was, and what
share of the step collectives took that nothing overlapped.

Passes are timed by the host's clock on a CPU, by CUDA events on a GPU. Costs such a step, on each rank that takes part:
two readings of the clock for each pass and each collective, and behind the step one wait for its end and one small
all-gather, whose numbers rank 0 waits for.
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.schedules import get_schedule_table

from parallel.ddp import Chunks
from parallel.fsdp import FullyShardedChunk
from parallel.groups import Ranks
from training.loop import Callback
from training.metrics.jsonl import JsonlSink
from training.metrics.rates import WARMUP_ITERATIONS
from training.metrics.values import Value, Values
from training.profile.files import timeline_path
from training.profile.range_names import BACKWARD, FORWARD, PHASES, WAIT, is_collective
from training.profile.ranges import StepRanges, ranged, replaced
from training.profile.spans import KINDS, RankTimeline, StepSpan, from_zero, pipeline_bubble
from training.progress import Progress
from training.step import StepResult

_KINDS = {FORWARD: "forward", BACKWARD: "backward", "reduce": "reduce", "update": "update"}
SHARDS = WAIT + "shards"
"""The wait for fully_shard's collectives."""


@dataclass(slots=True)
class Measured:
    """Of one step. Seconds since the rank knew the reduced loss and norm (the end of ``measure``), which all ranks know
    at the same moment, but for the latency of a small all-reduce."""

    spans: list[StepSpan] = field(default_factory=list)
    known_at_s: float = 0.0
    """That moment by the host's clock (time.perf_counter), which the ranks of a host share."""
    step_s: float = 0.0
    """From the first pass to the end of the update."""
    exposed_s: float = 0.0
    """Of it, in collectives: their calls, and waits for them."""


class StepClock:
    """Hears of a step's ranges (``ranges.Ranges``), and notes moments.

    On a GPU a moment is an event on the stream that computes: two for each pass and collective, no wait. ``read`` waits
    once.
    """

    def __init__(self, chunks: Chunks, device: torch.device) -> None:
        self.chunks, self.cuda = chunks, device.type == "cuda"
        self.stream = torch.cuda.current_stream() if self.cuda else None
        self._open: list[tuple[str, Any]] = []
        self._closed: list[tuple[str, Any, Any]] = []
        self._phase = ""
        self._first: Any = None
        self._known: Any = None
        self._newest: Any = None
        self._known_at_s = 0.0

    def push(self, name: str) -> None:
        if name == "forward_backward":  # of a step that is replayed, the last one counts
            self._closed, self._first = [], self._now()
        if name in PHASES:
            self._phase = name
        self._open.append((name, self._now() if self._counts(name) else None))

    def pop(self) -> None:
        name, begun = self._open.pop()
        if begun is not None:
            self._closed.append((name, begun, self._now()))
        if name == "measure":
            self._known, self._known_at_s = self._now(), time.perf_counter()
        if name == self._phase:
            self._phase = ""

    def read(self) -> Measured | None:
        """Of the step that has ended; None where there was none. On a GPU, waits for its end."""
        if self._known is None:
            return None
        if self.cuda:
            self._newest.synchronize()
        known_s = _between(self._first, self._known)
        times = [
            (name, _between(self._first, begin) - known_s, _between(self._first, end) - known_s)
            for name, begin, end in self._closed
        ]
        return Measured(
            spans=self._spans([(_KINDS[name], begin, end) for name, begin, end in times if name in _KINDS]),
            known_at_s=self._known_at_s,
            step_s=known_s + max([0.0, *(end for _, _, end in times)]),
            exposed_s=sum(end - begin for name, begin, end in times if is_collective(name)),
        )

    def _counts(self, name: str) -> bool:
        """Passes, where they are training's own; reduction and update; collectives that the compute stream waits for.

        Without those of ``measure``: there a rank waits for the last one, as the bubble shows already.
        """
        if name in (FORWARD, BACKWARD):
            return self._phase == "forward_backward"
        if is_collective(name):
            return self._phase not in ("", "measure") and self._is_computing()
        return name in _KINDS

    def _is_computing(self) -> bool:
        """On the stream that computes; fully_shard calls collectives on others. Events in a graph cannot be read."""
        if not self.cuda:
            return True
        return torch.cuda.current_stream() == self.stream and not torch.cuda.is_current_stream_capturing()

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        self._newest = torch.cuda.Event(enable_timing=True)
        self._newest.record(self.stream)
        return self._newest

    def _spans(self, times: Sequence[tuple[str, float, float]]) -> list[StepSpan]:
        """With microbatch and chunk, in the order in which Megatron's schedule goes through them."""
        passes = {kind: [span for span in times if span[0] == kind] for kind in ("forward", "backward")}
        count = len(self.chunks)
        microbatches = len(passes["forward"]) // count
        group = self.chunks[0].config.microbatch_group_size_per_vp_stage
        table = get_schedule_table(microbatches, count, group) if count > 1 else [(n, 0) for n in range(microbatches)]
        found = [StepSpan(kind, None, None, begin, end) for kind, begin, end in times if kind not in passes]
        for kind, own in passes.items():
            for (microbatch, chunk), (_, begin, end) in zip(table, own, strict=False):
                found.append(StepSpan(kind, microbatch, chunk if kind == "forward" else count - 1 - chunk, begin, end))
        return found


def _between(first: Any, last: Any) -> float:
    return last - first if isinstance(first, float) else first.elapsed_time(last) / 1e3


@contextlib.contextmanager
def waits_of_shards(clock: StepClock) -> Iterator[None]:
    """Within, the compute stream's waits for events are ranges: fully_shard waits so for what it runs on others."""
    if not clock.cuda or not any(isinstance(chunk, FullyShardedChunk) for chunk in clock.chunks):
        yield
        return
    wait = torch.cuda.Stream.wait_event
    ranged_wait = ranged(clock, SHARDS, wait)

    def waiting(stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        (ranged_wait if stream == clock.stream else wait)(stream, event)

    with replaced(torch.cuda.Stream, {"wait_event": waiting}):
        yield


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
