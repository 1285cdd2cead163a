"""The page: a table, and the pictures."""

import dataclasses
import html
from collections.abc import Sequence

from tools.plan.report import accuracy, charts
from tools.plan.report import table as report
from tools.plan.report.timeline import pipeline, words
from tools.plan.search.pricing import PricedLayout
from tools.plan.search.request import PlanRequest
from tools.plan.search.selection import best
from tools.shared import chart
from tools.shared.written import marked
from training.config.run_config import RunConfig

PARETO = "The fastest that fit. Green: ZeRO-0 and ZeRO-1; blue: ZeRO-2 and ZeRO-3; red: chosen."
STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 1120px; margin: 2em auto; padding: 0 1em; color: var(--ink);
  background: var(--page) }
h1 { font-size: 1.4em } h2 { font-size: 1.1em; margin-top: 2.2em }
pre { background: var(--soft); padding: .8em; overflow-x: auto; font-size: 11px } p { max-width: 70ch }
"""


GENERATOR = "python -m tools.plan"
PLACE = "--report", marked(f'<meta name="generator" content="{GENERATOR}">')
"""Where a page may go, for ``tools.shared.written``."""


def render(
    question: PlanRequest,
    plans: Sequence[PricedLayout],
    shown: Sequence[PricedLayout],
    chosen: PricedLayout,
    base: RunConfig | None = None,
) -> str:
    """One self-contained page. shown: those of the printed table, in its order. base: the recipe that the question came
    from. The chosen plan comes last where explain has asked for one that the table has not."""
    if all(plan.layout != chosen.layout for plan in shown):
        shown = [*shown, chosen]
    title = f"{question.model.shape} on {question.num_gpus:,} × {question.cluster.gpu.name}"
    parts = [
        _part("", "", _text(report.table(shown))),
        _part("Chosen", "Where its step and its memory go.", _text(report.details(chosen))),
        _part("Step time", "By what takes it; the line is where four of five runs lie.", charts.step_times(shown)),
        _part("Memory", "Of the fullest rank; dashed: the card, and 80 % of it.", charts.memory(shown)),
        _part("Time against memory", PARETO, charts.pareto(plans, chosen)),
    ]
    if chosen.layout.pp > 1:
        parts.append(_part("Pipeline", words(chosen), pipeline(question, chosen)))
    points = scaled(question, chosen, base)
    if len(points) > 1:
        parts.append(_part("More or fewer GPUs", _kept(question), charts.scaling(points)))
    parts.append(
        _part("Prediction against published runs", "".join(accuracy.unseen()[:1]), charts.published(accuracy.points()))
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="generator" content="{GENERATOR}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{html.escape(title)}</title>'
        f"<style>{chart.STYLE}{STYLE}</style></head>\n<body><h1>{html.escape(title)}</h1>\n{''.join(parts)}</body></html>\n"
    )


def _part(heading: str, words: str, body: str) -> str:
    head = f"<h2>{html.escape(heading)}</h2>" if heading else ""
    return f"{head}{f'<p>{html.escape(words)}</p>' if words else ''}\n{body}\n"


def _text(lines: Sequence[str]) -> str:
    return f"<pre>{html.escape(chr(10).join(lines))}</pre>"


def scaled(
    question: PlanRequest, chosen: PricedLayout, base: RunConfig | None = None
) -> list[tuple[int, PricedLayout]]:
    """The chosen plan, and the best on a quarter to four times as many GPUs, with the same batch and constraints.

    But for the number of replicas, which is what more GPUs are for.
    """
    free = question.without(*(name for name in question.fixed if name != "dp"))
    found = []
    for times in (0.25, 0.5, 1, 2, 4):
        world = int(question.num_gpus * times)
        if world != question.num_gpus * times:
            continue
        plan = chosen if times == 1 else best(dataclasses.replace(free, num_gpus=world), base)
        if plan is not None:
            found.append((world, plan))
    return found


def _kept(question: PlanRequest) -> str:
    kept = ", ".join(f"{name.upper()} {value}" for name, value in question.fixed.items() if name != "dp")
    return f"The chosen layout, and the best on fewer and on more GPUs{f', all with {kept}' if kept else ''}."
