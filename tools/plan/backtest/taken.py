"""What rows leave out and was taken for them, a line each: nothing is guessed without a word."""

from collections.abc import Sequence

from tools.plan.backtest.columns import unread
from tools.plan.backtest.machines import unknown_card
from tools.plan.backtest.models import guessed
from tools.plan.backtest.rows import PublishedRun
from tools.plan.cost.hardware import peak_tflops

SHOWN = 6
"""Names in a line."""
DEFAULTS = {"seq_len": "4,096 tokens", "n_gpus": "8 GPUs", "gbs": "one microbatch on each replica"}


def lines(rows: Sequence[PublishedRun]) -> list[str]:
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
