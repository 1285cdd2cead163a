"""backtest: the planner against a CSV of published runs."""

import csv
import io
import sys
from collections.abc import Hashable, Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from models.costs.cases import Column
from models.costs.predict import SAFE_SHARE
from program.errors import UserError
from program.printing import columns
from tests.planner import refit, validation
from tests.planner.columns import unread
from tests.planner.machines import unknown_card
from tests.planner.metrics import Errors, errors, grouped, memory_errors, order
from tests.planner.models import guessed
from tests.planner.peaks import as_given, peak_bytes, untold
from tests.planner.recipes import recipe
from tests.planner.rows import GIB, PUBLISHED, PublishedRun, read
from tools.plan.cost.cases import PricedColumns
from tools.plan.cost.constants import Constants, fitted, interval
from tools.plan.cost.hardware import peak_tflops
from tools.plan.cost.step import step_times
from tools.plan.flags import BacktestFlags
from tools.plan.report.accuracy import unseen
from tools.shared.written import check_file, marked, write_file


def backtest(flags: BacktestFlags) -> None:
    """Prints the tables; writes a prediction for every row where --output asks for it."""
    path = flags.runs or PUBLISHED
    rows = read(path)
    if not rows:
        raise UserError(f"{path}: no rows below the header.")
    if flags.refit:
        refit.refit(rows, note)
    if flags.output is not None:
        check_file(flags.output, *PLACE)
    predicted = validation.predicted_s(rows, fitted())
    held = peak_bytes(rows)
    print("\n".join([*assumptions(rows), *summary(rows, predicted)]))
    print("\n".join(memory_lines(rows, held)))
    if flags.cross_validate:
        print("\n".join(cross_validation(rows)))
    else:
        print("\n".join(unseen()))
    if flags.output is not None:
        write(flags.output, rows, predicted, held)
        print(f"written: {flags.output}")


def note(text: str) -> None:
    """Progress of what takes minutes."""
    print(text, file=sys.stderr, flush=True)


def summary(rows: Sequence[PublishedRun], predicted: NDArray[np.float64]) -> list[str]:
    """Errors of step time by source, then over dense models and those with experts, then order and regret."""
    lines = [f"{len(rows)} rows, {sum(row.measured_s is not None for row in rows)} with a measured time"]
    lines.append(f"{len(fields(Constants))} constants; no source's name is among their causes")
    table: list[tuple[str, ...]] = [
        ("source", "rows", "mean", "median", "p90", "bias", "pairs", "order", "groups", "top-1", "top-3")
    ]
    kinds: dict[Hashable, list[int]] = grouped(rows, lambda row: row.source)
    kinds.update(_kinds(rows))
    for name, numbers in kinds.items():
        own = [rows[number] for number in numbers]
        if any(row.measured_s for row in own):
            table.append((str(name)[:60], *_cells(errors(own, predicted[numbers])), *_order(own, predicted[numbers])))
    return [*lines, *columns(table, left=(0,))]


def _kinds(rows: Sequence[PublishedRun]) -> dict[str, list[int]]:
    return {
        "all dense": [number for number, row in enumerate(rows) if not row.experts],
        "all with experts": [number for number, row in enumerate(rows) if row.experts],
        "all": list(range(len(rows))),
    }


def _cells(found: Errors) -> tuple[str, ...]:
    return (
        f"{found.count}", f"{found.mean:.1%}", f"{found.median:.1%}", f"{found.p90:.1%}", f"{found.bias:+.1%}",
    )  # fmt: skip


def _order(rows: Sequence[PublishedRun], predicted: NDArray[np.float64]) -> tuple[str, ...]:
    found = order(rows, predicted)
    if not found.groups:
        return ("",) * 5
    right = f"{found.right:.3f}" if found.pairs else ""  # none far enough apart to have an order
    return (
        f"{found.pairs}", right, f"{found.groups}", f"{found.top1:.1%}", f"{found.top3:.1%}",
    )  # fmt: skip


def memory_lines(rows: Sequence[PublishedRun], held: Column) -> list[str]:
    """Errors of the peak, and the warning at 80 % of the card."""
    found = memory_errors(rows, held, SAFE_SHARE)
    line = SAFE_SHARE * np.array([row.case.machine.memory_bytes for row in rows])
    full = np.array(["composer" in row.text.get("framework", "").lower() for row in rows])  # llm-foundry fills it
    filling = int((full & (held > line)).sum())
    ran = np.array([row.measured_s is not None and not row.out_of_memory for row in rows])
    peaks = np.array([row.memory_bytes or 0.0 for row in rows])
    rightly = int((ran & (held > line) & (peaks > line)).sum())
    off = f", mean error {found.mean:.1%}, median {found.median:.1%}" if found.count else ""
    return [
        f"memory: {found.count or 'no'} published peaks{off}; out of "
        f"memory: {found.flagged_failed} of {found.failed} failed runs exceed {SAFE_SHARE:.0%} of the card, and "
        f"{found.flagged_succeeded} of {found.succeeded} that ran (false alarms; {filling} of these of a benchmark "
        f"that fills the card, {rightly} above the line by their own published peak); "
        f"of {sum(map(untold, rows))} rows that do not tell what is "
        f"recomputed, the least that fits",
        _by_recipes([row for row in rows if row.experts and row.measured_s and recipe(row.text) is not None]),
    ]


def _by_recipes(rows: Sequence[PublishedRun]) -> str:
    """Mixtures whose recipes tell what they recompute, where no choice here can make a run fit."""
    if not rows:
        return "of mixtures, no recipe tells what is recomputed"
    shares = as_given(rows) / np.array([row.case.machine.memory_bytes for row in rows])
    return (
        f"of {len(rows)} runs of mixtures whose recipes tell what they recompute, with that and no more, "
        f"{int((shares > SAFE_SHARE).sum())} exceed {SAFE_SHARE:.0%} of the card and {int((shares > 1).sum())} the card"
    )


def cross_validation(rows: Sequence[PublishedRun]) -> list[str]:
    """Each layout, then each cluster, by constants that have not seen it."""
    stated = [row for row in rows if row.measured_s]
    lines = []
    for name, held_out in (
        ("layout", validation.by_layout(stated, note)),
        ("cluster", validation.by_cluster(stated, note)),
    ):
        lines += [f"each {name} by constants fitted without it:", *summary(stated, held_out)[-4:]]
    return lines


PLACE = "--output", marked("id,predicted_step_s,predicted_memory_gb,")
"""Where the table may go, for ``tools.shared.written``."""


def write(path: Path, rows: Sequence[PublishedRun], predicted: NDArray[np.float64], held: Column) -> None:
    """One line a row, with both ends of the interval and the parts of the step. Memory in GiB, as mem_gb is."""
    times = step_times(PricedColumns([row.case for row in rows]), fitted())
    head = ["id", "predicted_step_s", "predicted_memory_gb", "low_s", "high_s", "measured_step_s"]
    file = io.StringIO(newline="")
    table = csv.writer(file)
    table.writerow(head + [f"{name}_s" for name in times.__slots__])
    for number, row in enumerate(rows):
        known, seconds = interval("experts" if row.experts else "dense"), float(predicted[number])
        table.writerow([
            row.id, repr(seconds), repr(float(held[number]) / GIB), repr(seconds * known.low),
            repr(seconds * known.high), "" if row.measured_s is None else repr(row.measured_s),
            *(repr(float(getattr(times, name)[number])) for name in times.__slots__),
        ])  # fmt: skip
    write_file(path, file.getvalue().encode(), *PLACE)


# ---- what rows leave out and was taken for them, a line each: nothing is guessed without a word


SHOWN = 6
"""Names in a line."""
DEFAULTS = {"seq_len": "4,096 tokens", "n_gpus": "8 GPUs", "gbs": "one microbatch on each replica"}


def assumptions(rows: Sequence[PublishedRun]) -> list[str]:
    """Empty where every row tells everything."""
    models, cards = [guessed(row.text) for row in rows], [unknown_card(row.text) for row in rows]
    found = [
        _line(models, "models are guessed from their size"),
        _line(cards, "cards are not known, and priced as an H100 of 80 GB"),
    ]
    for column, taken in DEFAULTS.items():
        found.append(
            _line(["" if row.text.get(column) else row.id for row in rows], f"{column} is empty, and taken as {taken}")
        )
    found += [
        _line([_format(row) for row in rows], "number formats are none of their cards', and priced in 16 bits"),
        _line([row.id if _other_world(row) else "" for row in rows], "TP x PP x CP x DP is not n_gpus"),
        _line([row.id if _other_batch(row) else "" for row in rows], "gbs is no multiple of mbs x DP, and rounded"),
    ]
    if columns := unread(list(rows[0].text)) if rows else []:
        found.append(f"columns that nothing is read from: {', '.join(columns)}")
    return [line for line in found if line]


def _format(row: PublishedRun) -> str:
    precision = row.case.layout.precision
    return "" if peak_tflops(row.cluster, precision) is not None else f"{precision} on {row.cluster.gpu.name}"


def _other_world(row: PublishedRun) -> bool:
    stated = row.text.get("n_gpus")
    return bool(stated) and row.case.layout.world_size != int(float(stated or 0))


def _other_batch(row: PublishedRun) -> bool:
    stated, layout = row.text.get("gbs"), row.case.layout
    return bool(stated) and layout.microbatches * layout.mbs * layout.dp != float(stated or 0)


def _line(names: Sequence[str], what: str) -> str:
    stated = [name for name in names if name]
    if not stated:
        return ""
    kinds = list(dict.fromkeys(stated))
    more = f" and {len(kinds) - SHOWN} more" if len(kinds) > SHOWN else ""
    return f"{len(stated)} {"row's" if len(stated) == 1 else "rows'"} {what}: {', '.join(kinds[:SHOWN])}{more}"
