"""Evaluations, text samples, versions and configuration: what is read rather than drawn."""

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from typing import Any

from tools.report.curves import all_names, chart, limits, words_of
from tools.report.markup import escaped, figure, grid, table, value_text
from tools.report.resources import spread
from tools.report.run_data import RunData, changed_fields, versions
from tools.shared.chart import COLOURS
from tools.shared.plot import Curve, Plot, Point

MOST_TASKS, MOST_PROMPTS, MOST_TEXTS = 40, 8, 5


def scores(run: RunData) -> dict[str, list[Point]]:
    """``task metric`` over iterations, of evaluations.jsonl; without their errors. The later line of two counts."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for line in run.evaluations:
        metrics = line.get("metrics")
        for name, value in metrics.items() if isinstance(metrics, dict) else ():
            number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e18
            if number and "stderr" not in name:
                found[f"{line.get('task')} {name}"][line["iteration"]] = float(value)
    return {name: [Point(at, values[at]) for at in sorted(values)] for name, values in found.items()}


def evaluations(runs: Sequence[RunData]) -> str:
    """Scores over iterations, and the newest ones side by side."""
    each = [scores(run) for run in runs]
    names = list(dict.fromkeys(chain.from_iterable(each)))[:MOST_TASKS]
    figures = [_score(runs, each, name) for name in names]
    logged = [name for name in all_names(runs) if name.startswith("eval/") and "stderr" not in name][:MOST_TASKS]
    figures += [chart(runs, [name], words_of(name.removeprefix("eval/"))) for name in logged if not names]
    rows = [
        (name, *(f"{one[name][-1].y:.4g} at {one[name][-1].x:,}" if name in one else "" for one in each))
        for name in names
    ]
    head = ("task", *(run.name if len(runs) > 1 else "newest" for run in runs))
    return grid(figures) + table(head, rows, numbers=range(1, len(head)))


def _score(runs: Sequence[RunData], each: Sequence[dict[str, list[Point]]], name: str) -> str:
    series = [
        Curve(name=run.name, points=one[name], colour=colour, dots=len(one[name]) <= 60)
        for run, one, colour in zip(runs, each, COLOURS * (1 + len(runs) // len(COLOURS)), strict=False)
        if name in one
    ]
    ends = limits([point.y for one in series for point in one.points])
    if ends is None:
        return ""
    xs = [point.x for one in series for point in one.points]
    plot = Plot(
        label=name,
        unit="",
        low=ends[0],
        high=ends[1],
        left_x=min(xs),
        right_x=max(xs),
        width=420,
        height=200,
        small=True,
    )
    return figure(name, plot.draw(series, keys=None if len(runs) > 1 else {}), f"{series[0].points[-1].y:.4g}")


def samples(run: RunData) -> str:
    """Of each prompt the first text, the newest, and some between."""
    by_prompt: dict[str, dict[int, str]] = defaultdict(dict)
    for line in run.samples:
        if isinstance(line.get("text"), str):
            by_prompt[str(line.get("prompt", ""))][line["iteration"]] = line["text"]
    found = ""
    for prompt, texts in list(by_prompt.items())[:MOST_PROMPTS]:
        order = sorted(texts)
        inner = "".join(
            f"<p class=quiet>iteration {at:,}</p><pre>{escaped(texts[at])}</pre>\n"
            for at in reversed(spread(order, MOST_TEXTS))
        )
        found += f"<details open><summary>{escaped(prompt) or '(no prompt)'}</summary>\n{inner}</details>\n"
    return found


def configuration(run: RunData) -> str:
    """Fields that are not at their default."""
    rows = [(name, value_text(value), value_text(default)) for name, value, default in changed_fields(run)]
    return table(("field", "value", "default"), rows)


def version_table(runs: Sequence[RunData]) -> str:
    """Of the programs, by the last start of each run; where it ran."""
    each = [versions(run) for run in runs]
    names = list(dict.fromkeys(chain.from_iterable(each)))
    rows: list[Sequence[Any]] = [(name, *(one.get(name, "") for one in each)) for name in names]
    for name in ("layout", "device", "nodes", "host"):
        values = [run.begins[-1].fields.get(name, "") if run.begins else "" for run in runs]
        if any(value not in ("", None) for value in values):
            rows.append((name, *values))
    return table(("", *(run.name if len(runs) > 1 else "" for run in runs)), rows)


def other_curves(runs: Sequence[RunData], shown: Sequence[str], most: int = 24) -> str:
    """Keys that no section has: of the user's own, and of other versions."""
    names = [
        name
        for name in all_names(runs)
        if name not in shown and not name.startswith(("epoch", "tokens/", "eval/", "validation_loss", "mtp_loss"))
    ]
    useful = [name for name in names if any(_varies(run, name) for run in runs)]
    return grid(chart(runs, [name], words_of(name)) for name in useful[:most])


def _varies(run: RunData, name: str) -> bool:
    column = run.metrics.column(name)
    return column is not None and len({value for value in column.values if math.isfinite(value)}) > 1
