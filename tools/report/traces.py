"""What the profiler left: the pipeline as each rank ran it, and where a traced step's time went."""

import math
from collections.abc import Iterator
from typing import Any

from tools.report.markup import figure, lasting, table
from tools.report.run_data import RunData
from tools.shared.plot import Bar, Part, rows

MOST_RANKS = 32
MOST_SPANS = 2000
"""Of one picture."""
KINDS = {"forward": "var(--c0)", "backward": "var(--c2)", "reduce": "var(--c1)", "update": "var(--c4)"}
"""Of training/profile/spans.py."""
PASSES = ("forward", "backward")
OTHER = "var(--c7)"
TIMES = ("total_s", "exposed_s")
"""Of a row; only communication can be hidden behind computation, and thus exposed."""
WINDOW = {
    "compute_s": ("compute", "var(--c0)"), "exposed_communication_s": ("exposed communication", "var(--c1)"),
    "exposed_messages_s": ("exposed messages", "var(--c4)"), "idle_s": ("idle", "var(--paler)"),
}  # fmt: skip


def pipeline(run: RunData) -> str:
    """The newest measured step, a row for each rank, by pipeline stage."""
    for step in reversed(run.timeline):
        ranks = sorted(_ranks(step), key=lambda one: (one[1], one[0]))
        if ranks:
            return _step(step["iteration"], ranks)
    return ""


def passes_s(run: RunData) -> float | None:
    """Seconds from the first pass of the newest measured step to its last; None where there is none."""
    for step in reversed(run.timeline):
        spans = [span for _, _, spans in _ranks(step) for span in spans if span[0] in PASSES]
        if spans:
            return max(span[3] for span in spans) - min(span[2] for span in spans)
    return None


def _ranks(step: dict[str, Any]) -> Iterator[tuple[int, int, list[tuple[str, str, float, float]]]]:
    """Rank, stage and spans (kind, words, begin, end) of a step, as far as they are such."""
    listed = step.get("ranks")
    for one in listed if isinstance(listed, list) else []:
        rank, stage, spans = (
            (one.get(name) for name in ("rank", "pp", "spans")) if isinstance(one, dict) else (None,) * 3
        )
        if type(rank) is not int or type(stage) is not int or not isinstance(spans, list):
            continue
        found = [span for raw in spans[:MOST_SPANS] if (span := _span(raw)) is not None]
        if found:
            yield rank, stage, found


def _span(raw: Any) -> tuple[str, str, float, float] | None:
    if not isinstance(raw, list) or len(raw) != 5 or not isinstance(raw[0], str):
        return None
    kind, microbatch, chunk, begin, end = raw
    of = f", microbatch {microbatch}, chunk {chunk}" if microbatch is not None else ""
    if (
        not all(isinstance(one, int | float) and math.isfinite(one) and abs(one) < 1e12 for one in (begin, end))
        or end < begin
    ):
        return None
    return kind, f"{kind}{of}: {lasting(end - begin)}", float(begin), float(end)


def _step(iteration: int, ranks: list[tuple[int, int, list[tuple[str, str, float, float]]]]) -> str:
    first = min(begin for _, _, spans in ranks for _, _, begin, _ in spans)
    last = max(end for _, _, spans in ranks for _, _, _, end in spans)
    milli = 1000 if last - first < 10 else 1
    bars, most = [], MOST_SPANS // max(1, min(len(ranks), MOST_RANKS))
    for rank, stage, spans in ranks[:MOST_RANKS]:
        parts = [
            Part((begin - first) * milli, (end - first) * milli, KINDS.get(kind, OTHER), f"rank {rank}: {words}")
            for kind, words, begin, end in spans[:most]
        ]
        busy = sum(end - begin for kind, _, begin, end in spans if kind in PASSES)
        idle = f"{1 - busy / ((last - first) or 1):.0%} not computing"
        bars.append(Bar(f"stage {stage}, rank {rank}", parts, idle))
    kinds = {kind for _, _, spans in ranks for kind, *_ in spans}
    names = {kind: KINDS[kind] for kind in KINDS if kind in kinds} | ({"other": OTHER} if kinds - KINDS.keys() else {})
    thick = 16 if len(bars) <= 16 else 9
    drawing = rows(
        "pipeline as measured", bars, high=(last - first) * milli, unit="ms" if milli == 1000 else "s", names=names,
        thick=thick,
    )  # fmt: skip
    more = f", the first {MOST_RANKS} of {len(ranks)} ranks" if len(ranks) > MOST_RANKS else ""
    return figure(f"Pipeline of iteration {iteration:,}, as measured{more}", drawing, lasting(last - first))


def profiles(run: RunData) -> str:
    """Of the newest summary: a bar for each traced rank, and the first rank's tables."""
    if not run.profiles:
        return ""
    name, summary = run.profiles[-1]
    ranks = [one for one in _list(summary.get("ranks")) if isinstance(one, dict)]
    bars = [Bar(f"rank {one.get('rank')}", list(_window(one))) for one in ranks[:MOST_RANKS]]
    bars = [bar for bar in bars if bar.parts]
    if not bars:
        return ""
    drawing = rows(
        "time of the traced iterations", bars, high=max(bar.parts[-1].end for bar in bars), unit="s",
        names=dict(WINDOW.values()),
    )  # fmt: skip
    found = figure(f"Trace {name}: where the time of the traced iterations went", drawing)
    for key, words in (
        ("kernels", "kernel or operator"),
        ("communication", "communication"),
        ("host_waits", "host wait"),
    ):
        times = TIMES if key == "communication" else TIMES[:1]
        lines = [
            (*(row.get(one, "") for one in ("name", "where", "calls")), *(_seconds(row.get(one)) for one in times))
            for row in _list(ranks[0].get(key))[:10]
            if isinstance(row, dict)
        ]  # fmt: skip
        heads = [time.removesuffix("_s") for time in times]
        found += table((words, "where", "calls", *heads), lines, numbers=range(2, 3 + len(heads)))
    return found


def _window(rank: dict[str, Any]) -> Iterator[Part]:
    at = 0.0
    for key, (words, colour) in WINDOW.items():
        seconds = rank.get(key)
        if isinstance(seconds, int | float) and 0 <= seconds < 1e9:
            yield Part(at, at + seconds, colour, f"{words}: {lasting(seconds)}")
            at += seconds


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _seconds(value: Any) -> str:
    return lasting(value) if isinstance(value, int | float) and 0 <= value < 1e9 else ""
