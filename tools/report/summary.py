"""The run in a few sentences: how it is, how far, how fast, when it will end."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence

from tools.report.events import FOUND
from tools.report.markup import bullets, counted, escaped, lasting, moment, table
from tools.report.metrics_table import Column
from tools.report.run_data import RunData
from tools.shared.chart import short
from training.run_dir.goodput import SPENT

RECENT = 100
"""Lines of metrics that count as the present."""
MOST_AVERAGED = 12
"""Lines of metrics that the present loss is a mean of, and at most a tenth of all."""
SLOWER = 0.9
"""Of the best speed, below which it is said."""
GOODPUT_FROM_S = 3600.0
"""Seconds of a run before which starting is most of it."""

STATES = {
    "running": ("running", "good"), "done": ("done", "good"), "stopped": ("stopped as asked", "good"),
    "failed": ("FAILED", "bad"), "unknown": ("not known to run", "warn"),
}  # fmt: skip


def summary(run: RunData) -> str:
    """State, figures, and what to look at."""
    state, kind = STATES[run.status]
    worries = list(concerns(run))
    healthy = "" if worries or run.status == "failed" else " and healthy: nothing needs a look"
    head = f'<p class="state {kind}">{escaped(state)}{healthy}</p>\n'
    if run.verdict:
        head += f"<p class=bad>{escaped(run.verdict)}</p>\n"
    return f"{head}<p>{escaped(' '.join(sentences(run)))}</p>\n{bullets(worries, 'warn')}"


def sentences(run: RunData) -> Iterator[str]:
    """What, how far, how good, how fast, until when."""
    staged = run.metrics.last("stage") is not None
    metrics, total = run.metrics, None if staged else run.setting("train.train_iters")
    if isinstance(model := run.setting("model.name") or run.setting("model.shape"), str):
        yield f"Model {model}."
    share = f" of {total:,} ({run.iteration / total:.0%})" if isinstance(total, int) and total > 0 else ""
    tokens = metrics.last("consumed_tokens")
    yield f"Iteration {run.iteration:,}{share}{f', {short(tokens)} tokens' if tokens is not None else ''}."
    if (loss := metrics.column("loss")) is not None:
        validation = metrics.column("validation_loss")
        held = f", validation loss {validation.values[-1]:.4f}" if validation else ""
        lines = _present(loss)
        of = f" (mean of the last {lines} lines)" if lines > 1 else ""
        yield f"Loss {_mean(loss.values[-lines:]):.4f}{of}{held}."
    if (speed := metrics.column("tokens_per_s_per_gpu")) is not None:
        mfu = metrics.last("mfu")
        said = f", MFU {mfu:.1%}" if mfu is not None else ""
        yield f"{_median(speed.values[-RECENT:]):,.0f} tokens/s per rank{said}."
    if run.status == "running" and (left_s := metrics.last("eta_s")) is not None and math.isfinite(left_s):
        of_stage = " in this stage" * staged
        yield f"About {lasting(left_s)} to go{of_stage}, until {moment(run.read_s + left_s)} UTC."
    if run.goodput.wall_s:
        starts = counted(run.goodput.restarts, "restart")
        yield f"Goodput {run.goodput.share:.1%} of {lasting(run.goodput.wall_s)}, {starts}."


def concerns(run: RunData) -> Iterator[str]:
    """What a person should look at, each with its number."""
    metrics = run.metrics
    loss = metrics.column("loss")
    if loss is not None and not math.isfinite(loss.values[-1]):
        yield f"The loss is {loss.values[-1]} at iteration {loss.iterations[-1]:,}."
    yield from _found(run)
    if (validation := metrics.column("validation_loss")) is not None and len(validation.values) >= 4:
        best = min(validation.values)
        if validation.values[-1] > 1.02 * best and validation.values[-2] > 1.02 * best:
            at = validation.iterations[validation.values.index(best)]
            yield f"The validation loss has risen from {best:.4f} at iteration {at:,} to {validation.values[-1]:.4f}."
    if (speed := metrics.column("tokens_per_s_per_gpu")) is not None and len(speed.values) > 3 * RECENT:
        best = max(
            _median(speed.values[place : place + RECENT]) for place in range(0, len(speed.values) - RECENT, RECENT)
        )
        if _median(speed.values[-RECENT:]) < SLOWER * best:
            yield f"Speed is down: {_median(speed.values[-RECENT:]):,.0f} tokens/s per rank, {best:,.0f} at its best."
    yield from _waits(run)
    for name, words in (
        ("gpu_throttled", "of the GPUs are throttled"),
        ("dropped_tokens", "of the assignments to experts are dropped"),
    ):
        if (share := metrics.last(name)) is not None and share > 0.01:
            yield f"{share:.1%} {words} ({name})."
    if (dead := metrics.last("dead_experts")) is not None and dead > 0:
        yield f"{counted(dead, 'expert')} got no token since the last line (dead_experts)."
    for name, lines in run.unreadable.items():
        yield f"{counted(lines, 'line')} of {name} cannot be read."


def _found(run: RunData) -> Iterator[str]:
    """By kind, of the last start: how often, and the newest one's words."""
    starts = [place for place, event in enumerate(run.events) if event.event == "start"]
    recent = run.events[starts[-1] :] if starts else run.events
    for kind, words in FOUND.items():
        found = [event for event in recent if event.event == kind]
        if found:
            times = f" ({len(found)} times in this start)" if len(found) > 1 else ""
            yield f"{words[0].upper()}{words[1:]}{times}: {found[-1].text('text')}"
    skipped = run.metrics.column("skipped")
    if skipped is not None and (number := sum(skipped.values[-RECENT:])):
        yield f"{counted(number, 'update')} skipped in the last {min(RECENT, len(skipped.values))} lines."


def _waits(run: RunData) -> Iterator[str]:
    metrics = run.metrics
    waited, per_iteration = metrics.column("data_wait_s"), metrics.column("iteration_s")
    if waited is not None and per_iteration is not None and len(waited.values) > 1:
        first = max(0, len(waited.values) - RECENT)
        iterations = waited.iterations[-1] - waited.iterations[first]
        share = sum(waited.values[first + 1 :]) / max(1e-9, iterations * _mean(per_iteration.values[-RECENT:]))
        if share > 0.05:
            yield f"{share:.0%} of the time of the last {len(waited.values) - first} lines is waiting for data."
    if run.goodput.wall_s > GOODPUT_FROM_S and run.goodput.share < 0.8:
        worst = max((spent for spent in SPENT if spent != "productive"), key=run.goodput.seconds)
        yield (
            f"Only {run.goodput.share:.0%} of the time counts; the largest other part is {worst}, "
            f"{lasting(run.goodput.seconds(worst))}."
        )


def several(runs: Sequence[RunData]) -> str:
    """A row for each run."""
    rows = []
    for run in runs:
        loss, speed = run.metrics.column("loss"), run.metrics.column("tokens_per_s_per_gpu")
        validation, mfu = run.metrics.last("validation_loss"), run.metrics.last("mfu")
        rows.append((
            run.name, STATES[run.status][0], f"{run.iteration:,}", short(run.metrics.last("consumed_tokens") or 0),
            f"{_mean(loss.values[-_present(loss) :]):.4f}" if loss else "",
            f"{validation:.4f}" if validation is not None else "",
            f"{_median(speed.values[-RECENT:]):,.0f}" if speed else "", f"{mfu:.1%}" if mfu is not None else "",
            f"{run.goodput.share:.1%}" if run.goodput.wall_s else "", f"{run.goodput.restarts}",
        ))  # fmt: skip
    head = ("run", "state", "iteration", "tokens", "loss", "validation", "tok/s/GPU", "MFU", "goodput", "restarts")
    return table(head, rows, numbers=range(2, len(head)))


def _present(loss: Column) -> int:
    """How many of its last lines the present loss is a mean of: of a short run few, or it is that of the whole run."""
    return max(1, min(MOST_AVERAGED, len(loss.values) // 10))


def _mean(values: Sequence[float], of: Callable[[Sequence[float]], float] = statistics.fmean) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return of(finite) if finite else math.nan


def _median(values: Sequence[float]) -> float:
    return _mean(values, statistics.median)
