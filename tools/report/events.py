"""What happened, in words and as marks on a chart."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from parallel.failures import STOPPED
from program.errors import cut_short
from tools.report.markup import counted, lasting, moment, table
from tools.report.run_data import RunData
from tools.shared.plot import Mark
from training.run_dir.history import Event

MOST_LISTED = 250
MOST_MARKS = 80
"""Of a kind; of more, so many spread over the run."""
FOUND = {
    "spike": "spike", "nonfinite": "NaN or Inf", "replayed": "NaN or Inf, replayed", "skipped": "update skipped",
    "straggler": "straggler", "slow": "iterations take longer", "memory_growth": "memory grows",
    "save_failed": "a save failed", "drift": "speed drifts", "fp8_shadow": "fp8 differs from bf16",
}  # fmt: skip
"""Events that say what was found wrong, by their name."""
ROUTINE = {"first_step", "save", "commit", "evaluation", "memory"}
"""Not listed: charts and sums have them."""
COLOURS = {
    "restart": "var(--c7)", "layout change": "var(--c3)", "skipped or replayed update": "var(--bad)",
    "spike": "var(--c5)", "stage": "var(--c4)", "skipped samples": "var(--c2)",
}  # fmt: skip
EXITS = {2: "bad input", STOPPED: "stopped on request, saved"}
STOPS = {"done": "training is done", "stage": "the stage is over", "requested": "stopped on request"}
"""By the reason of training/loop.py."""


def marks(run: RunData) -> list[Mark]:
    """Restarts, layout changes, stages, skipped updates and samples, and spikes, over iterations."""
    found: dict[str, list[Mark]] = {name: [] for name in COLOURS}
    stages = {one.iteration or 0: one.text("text") for one in run.events if one.event == "stage"}
    for iteration, text in stages.items():
        found["stage"].append(Mark(x=iteration, title=cut_short(text, 200), colour=COLOURS["stage"]))
    for before, now in pairwise(run.begins):
        if now.iteration in stages:
            continue
        changed = before.fields.get("layout") != now.fields.get("layout")
        kind = "layout change" if changed else "restart"
        text = f"{kind} at iteration {now.iteration}: {_layouts(before, now)}"
        found[kind].append(Mark(x=now.iteration or 0, title=cut_short(text, 200), colour=COLOURS[kind]))
    said = set[int]()
    for event in run.events:
        if event.event in ("spike", "nonfinite", "replayed", "skipped", "samples_skipped") and event.iteration:
            of_others = {"spike": "spike", "samples_skipped": "skipped samples"}
            kind = of_others.get(event.event, "skipped or replayed update")
            said.add(event.iteration)
            found[kind].append(
                Mark(x=event.iteration, title=cut_short(event.text("text") or kind, 200), colour=COLOURS[kind])
            )
    skipped = run.metrics.column("skipped")
    for iteration, number in zip(skipped.iterations, skipped.values, strict=True) if skipped else ():
        if number and iteration not in said:
            title = f"{counted(number, 'update')} skipped before iteration {iteration}"
            found["skipped or replayed update"].append(
                Mark(x=iteration, title=title, colour=COLOURS["skipped or replayed update"])
            )
    return [mark for kind in found.values() for mark in kind[:: -(-len(kind) // MOST_MARKS) or 1]]


def mark_names(found: Sequence[Mark]) -> dict[str, str]:
    """Of the legend: the kinds that are there."""
    return {name: colour for name, colour in COLOURS.items() if any(mark.colour == colour for mark in found)}


def _layouts(before: Event, now: Event) -> str:
    old, new = before.text("layout"), now.text("layout")
    return f"{old} before, {new} now" if old != new else new


def sentences(run: RunData) -> Iterator[tuple[Event, str]]:
    """Each event that is worth a line, oldest first."""
    starts, begun = 0, None
    for event in run.events:
        if event.event == "start":
            starts += 1
            ranks, host = counted(event.number("world_size"), "rank"), event.text("host")
            yield event, f"start {starts} on {host}: {ranks} ({event.text('launcher')})"
        elif event.event == "begin":
            yield event, _begins(event, begun)
            begun = event
        elif event.event == "stop":
            yield event, STOPS.get(reason := event.text("reason"), f"stopped at {reason}")
        elif event.event == "end":
            yield event, _ends(event)
        elif event.event == "death":
            yield event, f"died: {event.text('text') or 'without a word, and without a verdict'}"
        elif event.event not in ROUTINE:
            text = event.text("text") or ", ".join(f"{name} {value}" for name, value in event.fields.items())
            yield event, f"{FOUND.get(event.event, event.event.replace('_', ' '))}: {text}"


def _begins(event: Event, before: Event | None) -> str:
    where = f"{event.text('layout')}, {event.text('device')}"
    nodes = counted(event.number("nodes"), "node")
    if before is None and not event.iteration:
        return f"training begins: {where}, {nodes}"
    changed = before is not None and before.text("layout") != event.text("layout")
    was = f" (was: {before.text('layout')})" if changed and before is not None else ""
    return f"training continues at iteration {event.iteration}: {where}{was}, {nodes}"


def _ends(event: Event) -> str:
    code, text = int(event.number("exit_code")), event.text("text")
    how = f" ({EXITS[code]})" if code in EXITS else ""
    return f"exit code {code}{how}{f': {text}' if text else ''}"


def event_table(run: RunData) -> str:
    """The newest first."""
    listed = list(sentences(run))[::-1]
    rows = [
        (moment(event.time_s), "" if event.iteration is None else f"{event.iteration:,}", cut_short(text, 500))
        for event, text in listed[:MOST_LISTED]
    ]
    commits = [event for event in run.events if event.event == "commit"]
    body = table(("time (UTC)", "iteration", "what"), rows, numbers=(1,), times=(0,))
    more = (
        f"<p class=quiet>{len(listed) - MOST_LISTED:,} older events are in history.jsonl.</p>"
        if len(listed) > MOST_LISTED
        else ""
    )
    if commits:
        last, size = commits[-1], commits[-1].number("bytes") / 2**30
        more += (
            f"<p>{counted(len(commits), 'checkpoint')} committed, the last one of iteration {last.iteration or 0:,} at "
            f"{moment(last.time_s)} ({size:.3g} GiB, written in {lasting(last.number('seconds'))}).</p>"
        )
    return body + more
