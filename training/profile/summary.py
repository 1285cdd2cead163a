"""What a trace says in short: what took the time, how much communication nothing overlapped, where the host waited.

Of each moment of the window (the traced iterations) one thing is said, the first of these that holds:

- compute: a kernel or copy runs on the GPU; on a CPU, an operator in the thread that trains, while it does not wait
- exposed communication: a collective runs (an NCCL kernel; on a CPU, gloo's part of it, or the wait for it)
- exposed messages: a message between pipeline stages is under way, which includes the wait for the other stage
- idle: nothing of these; the host was too slow, or waited for data

so the four add up to the window.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from training.profile.chrome_trace import ANNOTATIONS, HOST_CALLS, KERNELS, OPERATORS, TraceEvent
from training.profile.intervals import Interval, length, union, within, without
from training.profile.range_names import MESSAGES, PHASES, WAIT, iteration_of

Device = Literal["cuda", "cpu"]
MOST_ROWS = 20
"""Of a table: kernels, and so on."""
_GLOO, _C10D = "gloo:", "c10d::"
_MESSAGES = {*MESSAGES, "coalesced"}
"""NCCL's and gloo's names of messages; a group of them is "coalesced"."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Row:
    """Spans of one name together."""

    name: str
    calls: int
    total_s: float
    """Of a kernel or operator without what it called."""
    exposed_s: float | None = None
    """Of communication: while no compute ran."""
    where: str = ""
    """Of communication, its process group; of a host wait, the range that it lies in."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RankSummary:
    """Of one rank's trace. Seconds, of the whole window."""

    rank: int
    device: Device
    first_iteration: int
    last_iteration: int
    window_s: float
    compute_s: float
    exposed_communication_s: float
    exposed_messages_s: float
    idle_s: float
    communication_s: float
    """All collectives, exposed or not."""
    messages_s: float
    host_wait_s: float
    """In which the thread that trains stood still for the GPU; on a CPU, for collectives and messages."""
    kernels: tuple[Row, ...]
    """Kernels, or on a CPU operators, that took most."""
    communication: tuple[Row, ...]
    host_waits: tuple[Row, ...]
    phases: tuple[Row, ...]
    """Of the step, on the host."""
    trace: str = ""
    """The file, beside the summary; empty where it was too large to be kept."""


def summarize(events: Sequence[TraceEvent], rank: int, device: Device) -> RankSummary:
    """Of the spans of one rank's trace, which ran on such a device."""
    ranges = (event for event in events if event.category == ANNOTATIONS)  # a GPU has them again, on its streams
    marks = [(event, number) for event in ranges if (number := iteration_of(event.name)) is not None]
    window = _window([event for event, _ in marks] or events)
    numbers = [number for _, number in marks] or [0]
    on_gpu = device == "cuda"
    threads = {event.thread for event, _ in marks} or {event.thread for event in events}
    waits = [event for event in events if event.thread in threads and _is_wait(event, on_gpu)]
    if on_gpu:
        working = [event for event in events if event.category in KERNELS and not _is_communication(event)]
        compute, blocked = within(union(map(_span, working)), window), list[TraceEvent]()
    else:
        working = [event for event in events if _is_operator(event) and event.thread in threads]
        compute, blocked = within(without(union(map(_span, working)), union(map(_span, waits))), window), waits
    talk = [event for event in events if _is_communication(event)]
    collectives = within(union(_span(event) for event in [*talk, *blocked] if not _is_message(event)), window)
    messages = within(union(_span(event) for event in [*talk, *blocked] if _is_message(event)), window)
    exposed = without(collectives, compute)
    exposed_messages = without(without(messages, compute), exposed)
    spent = length(compute) + length(exposed) + length(exposed_messages)
    return RankSummary(
        rank=rank,
        device=device,
        first_iteration=min(numbers),
        last_iteration=max(numbers),
        window_s=window[1] - window[0],
        compute_s=length(compute),
        exposed_communication_s=length(exposed),
        exposed_messages_s=length(exposed_messages),
        idle_s=window[1] - window[0] - spent,
        communication_s=length(collectives),
        messages_s=length(messages),
        host_wait_s=length(within(union(map(_span, waits)), window)),
        kernels=_largest(_kernel_rows(working) if on_gpu else _operator_rows(working, waits)),
        communication=_largest(_communication_rows(talk, compute)),
        host_waits=_largest(_wait_rows(waits, events)),
        phases=tuple(_phase_rows(events)),
    )


def _span(event: TraceEvent) -> Interval:
    return event.begin_s, event.end_s


def _window(events: Iterable[TraceEvent]) -> Interval:
    spans = [_span(event) for event in events] or [(0.0, 0.0)]
    return min(begin for begin, _ in spans), max(end for _, end in spans)


def _is_operator(event: TraceEvent) -> bool:
    """Of torch, but for the call of a collective, which only hands it to gloo."""
    return event.category == OPERATORS and not event.name.startswith(_C10D)


def _is_communication(event: TraceEvent) -> bool:
    if event.category in KERNELS:
        return event.name.startswith("nccl")
    return event.category == ANNOTATIONS and event.name.startswith(_GLOO)


def _communication_name(event: TraceEvent) -> str:
    if event.category == ANNOTATIONS:
        return event.name.removeprefix(_GLOO).removeprefix(WAIT)
    return str(event.args.get("Collective name") or event.name)


def _is_message(event: TraceEvent) -> bool:
    """NCCL exchanges all-to-alls by the kernel for messages: what was called decides, where the trace has it."""
    name = _communication_name(event)
    return name in _MESSAGES or (name == event.name and "SendRecv" in name)


def _is_wait(event: TraceEvent, on_gpu: bool) -> bool:
    """Calls of CUDA in which the host stands still; on a CPU, waits for gloo."""
    if on_gpu:
        return event.category in HOST_CALLS and (event.name.endswith("Synchronize") or event.name == "cudaMemcpy")
    return event.category == ANNOTATIONS and event.name.startswith(WAIT)


def _largest(rows: Iterable[Row]) -> tuple[Row, ...]:
    return tuple(sorted(rows, key=lambda row: (-row.total_s, row.name, row.where))[:MOST_ROWS])


def _kernel_rows(events: Iterable[TraceEvent]) -> Iterator[Row]:
    spent = defaultdict[str, list[float]](list)
    for event in events:
        spent[event.name].append(event.end_s - event.begin_s)
    return (Row(name=name, calls=len(each), total_s=sum(each)) for name, each in spent.items())


def _operator_rows(operators: Sequence[TraceEvent], waits: Sequence[TraceEvent]) -> Iterator[Row]:
    """By the time that an operator took without operators that it called, and without waits."""
    calls, own = defaultdict[str, int](int), defaultdict[str, float](float)
    waiting = set(map(id, waits))
    for event, around in nested([*operators, *waits]):
        spent = event.end_s - event.begin_s
        if id(event) not in waiting:
            calls[event.name] += 1
            own[event.name] += spent
        if around is not None and id(around) not in waiting:
            own[around.name] -= spent
    return (Row(name=name, calls=count, total_s=own[name]) for name, count in calls.items())


def _communication_rows(events: Iterable[TraceEvent], compute: Sequence[Interval]) -> Iterator[Row]:
    spans = defaultdict[tuple[str, str], list[Interval]](list)
    for event in events:
        group = str(event.args.get("Process Group Description") or "")
        spans[_communication_name(event), group].append(_span(event))
    for (name, group), each in spans.items():
        own = union(each)
        total, exposed = sum(end - begin for begin, end in each), length(without(own, compute))
        yield Row(name=name, calls=len(each), total_s=total, exposed_s=exposed, where=group)


def _wait_rows(waits: Sequence[TraceEvent], events: Iterable[TraceEvent]) -> Iterator[Row]:
    """By name, and by the innermost range of a step that a wait lies in."""
    kept = set(map(id, waits))
    ranges = [event for event in events if event.category == ANNOTATIONS and not event.name.startswith(_GLOO)]
    spent = defaultdict[tuple[str, str], list[float]](list)
    for event, around in nested([*ranges, *(event for event in waits if event.category != ANNOTATIONS)]):
        if id(event) in kept:
            spent[event.name, around.name if around else ""].append(event.end_s - event.begin_s)
    return (Row(name=name, calls=len(each), total_s=sum(each), where=where) for (name, where), each in spent.items())


def _phase_rows(events: Sequence[TraceEvent]) -> Iterator[Row]:
    for phase in PHASES:
        each = [event for event in events if event.category == ANNOTATIONS and event.name == phase]
        if each:
            yield Row(name=phase, calls=len(each), total_s=sum(event.end_s - event.begin_s for event in each))


def nested(events: Iterable[TraceEvent]) -> Iterator[tuple[TraceEvent, TraceEvent | None]]:
    """Each span with the innermost one of its thread that it lies in."""
    threads = defaultdict[object, list[TraceEvent]](list)
    for event in events:
        threads[event.thread].append(event)
    for own in threads.values():
        around: list[TraceEvent] = []
        for event in sorted(own, key=lambda one: (one.begin_s, -one.end_s)):
            while around and around[-1].end_s <= event.begin_s:
                around.pop()
            yield event, around[-1] if around else None
            around.append(event)
