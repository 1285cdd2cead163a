"""Where a run's time went, over all its starts: a pure function of its history.

    productive   iterations that count in the end
    checkpoint   training stood still for saves
    evaluation
    restart      from a launch to its first step, from the last step to the end, and from a death to the next launch
    lost         iterations that were done again, and the time from the last step that counts to a death
    idle         no start at all: between a start that ended as asked and the next one

Together they are the wall time from the first launch to the last event, to the second.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from parallel.failures import STOPPED
from training.run_dir.history import Event

Spent = Literal["productive", "checkpoint", "evaluation", "restart", "lost", "idle"]
SPENT: tuple[Spent, ...] = get_args(Spent)
AS_ASKED = (0, STOPPED, 2)
"""Exit codes after which nothing has to be started again at once: done, stopped on request, bad input."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TimeSpan:
    """A stretch of the run's time; ``start`` counts launches from 0, and is that of the launch before a gap."""

    spent: Spent
    begin_s: float
    end_s: float
    start: int


@dataclass(kw_only=True, slots=True, frozen=True)
class MeasuredGoodput:
    """Spans without gaps, in order."""

    spans: tuple[TimeSpan, ...] = ()
    restarts: int = 0
    """Launches after the first."""

    @property
    def wall_s(self) -> float:
        return self.spans[-1].end_s - self.spans[0].begin_s if self.spans else 0.0

    @property
    def share(self) -> float:
        """Productive seconds over wall seconds; 0 before there are any."""
        return self.seconds("productive") / self.wall_s if self.wall_s else 0.0

    def seconds(self, spent: Spent) -> float:
        """The sum of one kind."""
        return math.fsum(span.end_s - span.begin_s for span in self.spans if span.spent == spent)


@dataclass(kw_only=True, slots=True)
class StartRecord:
    """What the history tells of one launch; times run on where the clock stepped back."""

    attempt: str
    launched_s: float
    last_s: float
    """When it was last known to be alive."""
    resumed: int | None = None
    """The iteration at which training began; None: it never did."""
    first_step_s: float | None = None
    stopped_s: float | None = None
    """The loop has ended."""
    ended_s: float | None = None
    as_asked: bool = False
    """It ended as it was meant to."""
    committed: int = 0
    stalls: list[tuple[float, float, Spent]] = field(default_factory=list)
    """Begin, end and kind of what stood in training's way, in order."""
    points: list[tuple[float, int]] = field(default_factory=list)
    """When which iteration was reached."""


def measured_goodput(events: Sequence[Event], now_s: float | None = None, last_line_s: float = 0.0) -> MeasuredGoodput:
    """now_s: the last start is running at this moment; None: it has ended, or died.

    last_line_s: when the last line of metrics.jsonl was written: as long did a start without an end live.
    """
    records = start_records(events)
    if not records:
        return MeasuredGoodput()
    last = records[-1]
    if last.ended_s is None:
        last.last_s = max(last.last_s, last_line_s if now_s is None else now_s)
    spans: list[TimeSpan] = []
    for number, record in enumerate(records):
        if number:
            gap: Spent = "idle" if records[number - 1].as_asked else "restart"
            spans.append(_span(gap, spans[-1].end_s, record.launched_s, number - 1))
        spans += _spans(record, number, _limit(records, number, now_s is not None))
    stages = {event.text("name") for event in events if event.event == "stage" and event.iteration}
    restarts = max(0, len(records) - 1 - len(stages))  # a stage begins with a start of its own, once
    return MeasuredGoodput(spans=tuple(span for span in spans if span.end_s > span.begin_s), restarts=restarts)


def start_records(events: Sequence[Event]) -> list[StartRecord]:
    """A record per launch. Of two that overlap the later one owns the folder: what the other writes is left out."""
    records: list[StartRecord] = []
    for event, at_s, shift_s in _running_clock(events):
        now = records[-1] if records else None
        if event.event == "start":
            before_s = -math.inf if now is None else now.ended_s or now.last_s
            launched_s = max(at_s - max(0.0, event.number("age_s")), before_s)
            records.append(StartRecord(attempt=event.text("attempt"), launched_s=launched_s, last_s=at_s))
        elif now is not None and event.fields.get("attempt", now.attempt) == now.attempt and now.ended_s is None:
            _add(now, event, at_s, shift_s)
    return records


def _add(record: StartRecord, event: Event, at_s: float, shift_s: float) -> None:
    """What an event says of the start that it belongs to."""
    name, iteration = event.event, event.iteration or 0
    if name == "death":
        record.ended_s = min(at_s, max(record.last_s, event.number("died_s") + shift_s))
        record.last_s = record.ended_s
        return
    stalled_s = max(0.0, event.number("seconds")) if name in ("save", "evaluation") else 0.0
    record.last_s = at_s
    if name == "begin":
        record.resumed = iteration
        record.committed = iteration
    elif name == "first_step":
        record.first_step_s = at_s
    elif name in ("save", "evaluation"):
        record.stalls.append((at_s - stalled_s, at_s, "checkpoint" if name == "save" else "evaluation"))
    elif name == "commit":
        record.committed = max(record.committed, iteration)
        _lengthen(record, event.number("stall_s"))
    elif name == "stop":
        record.stopped_s = at_s
    elif name == "end":
        record.ended_s, record.as_asked = at_s, event.number("exit_code") in AS_ASKED
    known = record.points[-1][1] if record.points else 0
    if name in ("begin", "first_step", "save", "evaluation", "stop") and iteration >= known:
        record.points.append((at_s - stalled_s, iteration))


def _lengthen(record: StartRecord, stall_s: float) -> None:
    """The update after a save in the background may have waited for its copy: known once the checkpoint is complete."""
    if record.stalls and record.stalls[-1][2] == "checkpoint":
        begin_s, end_s, spent = record.stalls[-1]
        record.stalls[-1] = begin_s, min(record.last_s, max(end_s, begin_s + stall_s)), spent


def _running_clock(events: Sequence[Event]) -> Iterator[tuple[Event, float, float]]:
    """Each event with a time that never goes back, and by how much that differs from its own clock's."""
    shift_s, last_s = 0.0, -math.inf
    for event in events:
        shift_s += max(0.0, last_s - event.time_s - shift_s)
        last_s = event.time_s + shift_s
        yield event, last_s, shift_s


def _limit(records: Sequence[StartRecord], number: int, running: bool) -> float:
    """The iteration up to which what this start did counts in the end."""
    resumed = [record.resumed for record in records[number + 1 :] if record.resumed is not None]
    if resumed:
        return min(resumed)
    newest = records[number]
    if newest.as_asked or newest.stopped_s is not None or (running and number == len(records) - 1):
        return math.inf
    return newest.committed


def _spans(record: StartRecord, number: int, limit: float) -> Iterator[TimeSpan]:
    end_s = record.last_s if record.ended_s is None else record.ended_s
    first_s = end_s if record.first_step_s is None else record.first_step_s
    yield _span("restart", record.launched_s, first_s, number)
    stopped_s = end_s if record.stopped_s is None else max(first_s, record.stopped_s)
    counts_until_s = _reached(record, limit)
    at_s = first_s
    for begin_s, stall_end_s, spent in [*record.stalls, (stopped_s, stopped_s, "restart")]:
        begin_s, stall_end_s = max(at_s, min(begin_s, stopped_s)), max(at_s, min(stall_end_s, stopped_s))
        good_s = min(max(at_s, counts_until_s), begin_s)
        yield _span("productive", at_s, good_s, number)
        yield _span("lost", good_s, begin_s, number)
        yield _span(spent, begin_s, stall_end_s, number)
        at_s = stall_end_s
    yield _span("restart", at_s, end_s, number)


def _reached(record: StartRecord, limit: float) -> float:
    """When the iteration ``limit`` was done, by a straight line between two known ones; Inf: this start did no more."""
    iterations = [iteration for _, iteration in record.points]
    if limit == math.inf or not iterations or (record.stopped_s is not None and limit >= iterations[-1]):
        return math.inf
    place = bisect_left(iterations, limit)
    if place == len(iterations):
        return record.points[-1][0]
    at_s, iteration = record.points[place]
    if iteration == limit or place == 0:
        return at_s if iteration == limit else -math.inf
    before_s, before = record.points[place - 1]
    return before_s + (at_s - before_s) * (limit - before) / (iteration - before)


def _span(spent: Spent, begin_s: float, end_s: float, start: int) -> TimeSpan:
    return TimeSpan(spent=spent, begin_s=begin_s, end_s=max(begin_s, end_s), start=start)
