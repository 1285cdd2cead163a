"""A measured timeline of a step: who computed when, and what share of the pipeline's time was idle."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

KINDS = ("forward", "backward", "reduce", "update")
"""Passes of a microbatch through a chunk; reduction of gradients; update of weights."""
PASSES = KINDS[:2]


class StepSpan(NamedTuple):
    """What a rank did from one moment to another."""

    kind: str
    microbatch: int | None
    chunk: int | None
    """Of this rank's chunks, one for each virtual stage. None, as ``microbatch``, where it is of none."""
    begin_s: float
    end_s: float


@dataclass(kw_only=True, slots=True, frozen=True)
class RankTimeline:
    """Of one rank, in the order of the beginnings."""

    rank: int
    pp: int
    """Its stage."""
    spans: tuple[StepSpan, ...]


@dataclass(kw_only=True, slots=True, frozen=True)
class Timeline:
    """A line of timeline.jsonl. Seconds since the first pass of the step began."""

    iteration: int
    ranks: tuple[RankTimeline, ...]


def pipeline_bubble(pipelines: Iterable[Sequence[Sequence[StepSpan]]]) -> float:
    """Share of the pipelines' time, from the first pass to the last, in which their ranks are in no pass.

    pipelines: of each its ranks' spans, by one clock. With equal passes, p ranks, m microbatches and v chunks a rank
    it is (p - 1) / (v m + p - 1): idle over all time, where ``parallel.layout.bubble`` is idle over computing time.
    """
    idle = whole = 0.0
    for ranks in pipelines:
        passes = [[span for span in spans if span.kind in PASSES] for spans in ranks]
        every = [span for own in passes for span in own]
        if every:
            duration = max(span.end_s for span in every) - min(span.begin_s for span in every)
            whole += duration * len(ranks)
            idle += duration * len(ranks) - sum(span.end_s - span.begin_s for span in every)
    return idle / whole if whole else 0.0


def from_zero(timelines: Sequence[RankTimeline]) -> tuple[RankTimeline, ...]:
    """With the first beginning at 0, to microseconds."""
    zero = min((span.begin_s for one in timelines for span in one.spans), default=0.0)
    return tuple(
        RankTimeline(
            rank=one.rank,
            pp=one.pp,
            spans=tuple(
                span._replace(begin_s=round(span.begin_s - zero, 6), end_s=round(span.end_s - zero, 6))
                for span in sorted(one.spans, key=lambda span: span.begin_s)
            ),
        )
        for one in timelines
    )
