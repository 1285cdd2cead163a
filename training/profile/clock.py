"""When this rank's passes begin and end: by the host's clock on a CPU, by CUDA events on a GPU."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import get_schedule_table

from parallel.ddp import Chunks
from parallel.fsdp import FullyShardedChunk
from training.profile.range_names import BACKWARD, FORWARD, PHASES, WAIT, is_collective
from training.profile.spans import StepSpan

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

    def waiting(stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        if stream != clock.stream:
            wait(stream, event)
            return
        clock.push(SHARDS)
        try:
            wait(stream, event)
        finally:
            clock.pop()

    torch.cuda.Stream.wait_event = waiting  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.cuda.Stream.wait_event = wait  # type: ignore[method-assign]
