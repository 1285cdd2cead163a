"""Whether a run's history, its goodput and its page tell what was injected into it."""

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tests.tools.page_checks import check_page, sections_of
from tools.report.run_data import RunData, read_run
from training.run_dir.goodput import SPENT
from training.run_dir.history import Event, read_history

INJECTED = "injected.jsonl"
SAYS = {
    "SIGKILL of a rank": "rank {rank} of 4",
    "SIGKILL of the launcher": "SIGKILL",
    "SIGSTOP of a rank": "rank {rank} of 4",
}
"""What the end of a start must say of the fault that ended it."""
HOW = {"SIGKILL of a rank": "SIGKILL", "SIGSTOP of a rank": "is stopped (SIGSTOP)"}


@dataclass(kw_only=True, slots=True, frozen=True)
class Injected:
    """One fault, as it was injected."""

    time_s: float
    kind: str
    rank: int
    iteration: int
    """The last one in metrics.jsonl."""


def story_problems(run_dir: Path, injected: Sequence[Injected], began_s: float, ended_s: float) -> list[str]:
    """What differs, in sentences."""
    events, run = read_history(run_dir), read_run(run_dir)
    found = [*_starts(events, injected), *_findings(events, injected), *_times(run, injected, began_s, ended_s)]
    return [*found, *_page((run_dir / "report.html").read_text(), run, injected)]


def _starts(events: Sequence[Event], injected: Sequence[Injected]) -> Iterator[str]:
    """Each start but the last ended by the fault that was injected into it, in that order."""
    ending = [one for one in injected if one.kind != "NaN"]
    ends = [event for event in events if event.event in ("end", "death")]
    starts = [event for event in events if event.event == "start"]
    if len(starts) != len(ending) + 1 or len(ends) != len(starts):
        yield f"{len(ending)} faults that end a start, but {len(starts)} starts and {len(ends)} ends"
        return
    for one, end in zip(ending, ends, strict=False):
        text, code = end.text("text"), end.fields.get("exit_code")
        if one.kind in SAYS:
            for said in (SAYS[one.kind].format(rank=one.rank), HOW.get(one.kind, "")):
                if said not in text:
                    yield f"{one.kind} {one.rank} after iteration {one.iteration}: {said!r} is not in {text!r}"
            if end.event == "end" and code in (0, 75):
                yield f"{one.kind}: the start ended with exit code {code}"
        elif code != 75:
            yield f"{one.kind}: exit code {code}, expected 75 ({text})"
    if ends[-1].fields.get("exit_code") != 75:
        yield f"the last start ended with {ends[-1].fields}"
    layouts = [str(event.fields.get("layout")) for event in events if event.event == "begin"]
    changes = sum(before != now for before, now in pairwise(layouts))
    if changes != sum(one.kind == "layout" for one in injected):
        yield f"{changes} changes of the layout: {layouts}"


def _findings(events: Sequence[Event], injected: Sequence[Injected]) -> Iterator[str]:
    nans = [one for one in injected if one.kind == "NaN"]
    replayed = [event for event in events if event.event == "replayed"]
    if [event.iteration for event in replayed] != [one.iteration + 40 for one in nans]:
        yield f"NaN at {[one.iteration + 40 for one in nans]}, replayed: {[event.iteration for event in replayed]}"
    for event in events:
        if event.event in ("nonfinite", "save_failed", "skipped"):
            yield f"nothing was injected that explains: {event.fields.get('text')}"


def _times(run: RunData, injected: Sequence[Injected], began_s: float, ended_s: float) -> Iterator[str]:
    """The parts add up to the time between the first launch and the end, which this process's clock has, too."""
    goodput = run.goodput
    total = sum(goodput.seconds(spent) for spent in SPENT)
    if abs(total - goodput.wall_s) > 0.01:
        yield f"the parts add up to {total:.2f} s, the wall time is {goodput.wall_s:.2f} s"
    if not 0.9 < goodput.wall_s / (ended_s - began_s) <= 1.0:
        yield f"the history tells of {goodput.wall_s:.0f} s, the soak took {ended_s - began_s:.0f} s"
    if not 0.05 < goodput.share < 1.0:
        yield f"goodput is {goodput.share:.1%}"
    evaluated = run.iteration > run.setting("train.eval_interval")
    for spent in ("checkpoint", "restart", *(("evaluation",) if evaluated else ())):
        if goodput.seconds(spent) <= 0:
            yield f"no time was spent in {spent}"
    if any(one.kind.startswith("SIG") for one in injected) and goodput.seconds("lost") <= 0:
        yield "ranks were killed, and nothing was lost"
    loss = run.metrics.columns["loss"]
    if loss.iterations[1:] != sorted(set(loss.iterations[1:])) or run.status != "stopped":
        yield f"the run is {run.status}, or its iterations are out of order"
    if run.metrics.last("restarts") != goodput.restarts:
        yield f"the last line has {run.metrics.last('restarts')} restarts, the history {goodput.restarts}"


def _page(text: str, run: RunData, injected: Sequence[Injected]) -> Iterator[str]:
    try:
        words = check_page(text)
    except AssertionError as error:
        yield f"the page: {error}"
        return
    listed = html.unescape(sections_of(text)["events"])
    for event in run.events:
        if event.event in ("end", "death", "replayed") and event.text("text")[:400] not in listed:
            yield f"the page does not tell: {event.text('text')}"
    if f"{run.goodput.restarts} restart" not in words:
        yield f"the page does not tell of {run.goodput.restarts} restarts"
    pictures = sections_of(text)["loss"]
    marks = pictures.count("replayed") + pictures.count("passing fault")
    if any(one.kind == "NaN" for one in injected) and not marks:
        yield "the curve of the loss has no mark for a replayed update"
