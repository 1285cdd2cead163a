"""Memory, data, experts and machines."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeGuard

from tools.report.curves import all_names, chart, small_charts, words_of
from tools.report.markup import figure, grid, table
from tools.report.run_data import RunData
from tools.shared.chart import COLOURS, short
from tools.shared.plot import Bar, Curve, Part, Point, heat, rows, stacked

GIB = 2**30
HELD = {
    "weights": "var(--c0)", "gradients": "var(--c2)", "optimizer": "var(--c6)", "activations": "var(--c4)",
    "workspace": "var(--pale)",
}  # fmt: skip
MOST_ROWS = 96
MOST_PICTURES = 8
MOST_SQUARES = 2000
"""Of a heat map: more experts are taken together, or fewer iterations shown."""
MOST_SOURCES = 8
"""With a colour of their own."""
MACHINE = (
    "gpu_utilization", "gpu_sm_clock_mhz", "gpu_throttled", "gpu_power_w", "gpu_energy_j", "gpu_temperature_c",
    "network_sent_gib", "network_received_gib", "network_errors", "host_memory_gib", "host_memory_available_gib",
)  # fmt: skip


def memory(runs: Sequence[RunData]) -> str:
    """Predicted beside measured, of each run's last start; then the curve."""
    bars: list[Bar] = []
    for run in runs:
        said = [event for event in run.events if event.event == "memory"]
        for kind in ("predicted", "measured") if said else ():
            name = f"{run.name}, {kind}" if len(runs) > 1 else kind
            bars.append(Bar(name, list(_held(said[-1].fields.get(kind)))))
    bars = [bar for bar in bars if bar.parts]
    body = ""
    if bars:
        high = max(bar.parts[-1].end for bar in bars)
        unit, size = next(
            ((unit, size) for unit, size in (("GiB", 1), ("MiB", 1024), ("KiB", 1 << 20)) if high * size >= 1),
            ("bytes", GIB),
        )
        scaled = [
            Bar(
                bar.name,
                [Part(part.begin * size, part.end * size, *part[2:]) for part in bar.parts],
                f"{short(bar.parts[-1].end * size)} {unit}",
            )
            for bar in bars
        ]
        drawing = rows("memory of the fullest rank", scaled, high=high * size, unit=unit, names=HELD)
        body = figure("Memory of the fullest rank, after the third step", drawing)
    return body + grid(small_charts(runs, ["memory_gib"]))


def _held(table: Any) -> Iterator[Part]:
    at = 0.0
    for name, colour in HELD.items():
        size = table.get(name) if isinstance(table, dict) else None
        if isinstance(size, int | float) and 0 < size < 1e18:
            yield Part(at, at + size / GIB, colour, f"{name}: {size / GIB:.3g} GiB")
            at += size / GIB


def data(runs: Sequence[RunData]) -> str:
    """How often each source was read, and of a single run its mixture over time."""
    names = [name for name in all_names(runs) if name == "epoch" or name.startswith("epoch/")]
    body = chart(runs, names[: 2 * MOST_SOURCES], "epochs", axis="zero") if names else ""
    body = grid([body, *small_charts(runs, ["batch_size", "data_wait_s"])])
    return (_mixture(runs[0]) if len(runs) == 1 else "") + body


def _mixture(run: RunData) -> str:
    """Of ``tokens/*``: the share of each source between points that are spread over the run."""
    names = sorted(
        (name for name in run.metrics.names() if name.startswith("tokens/")),
        key=lambda name: -run.metrics.columns[name].values[-1],
    )
    if len(names) < 2:
        return ""
    columns = [run.metrics.columns[name] for name in names]
    shared = sorted(set.intersection(*(set(column.iterations) for column in columns)))
    if len(shared) < 2:
        return ""
    at = spread(shared, 61)
    taken = [dict(zip(column.iterations, column.values, strict=True)) for column in columns]
    shares = [[max(0.0, one[end] - one[begin]) for begin, end in pairwise(at)] for one in taken]
    layers = [
        Curve(name=name.removeprefix("tokens/"), points=list(map(Point, at[1:], share)), colour=colour)
        for name, share, colour in zip(names, shares[: MOST_SOURCES - 1], COLOURS, strict=False)
    ]  # fmt: skip
    if rest := shares[MOST_SOURCES - 1 :]:
        points = [Point(x, sum(ys)) for x, *ys in zip(at[1:], *rest, strict=True)]
        layers.append(Curve(name=f"{len(rest)} more", points=points, colour="var(--pale)"))
    total = sum(one[at[-1]] for one in taken) or 1.0
    listed = [
        (name.removeprefix("tokens/"), short(one[at[-1]]), f"{one[at[-1]] / total:.1%}", _epochs(run, name))
        for name, one in zip(names, taken, strict=True)
    ]
    return figure("Mixture of sources", stacked("mixture of sources over iterations", layers)) + table(
        ("source", "tokens", "share", "epochs"), listed[:50], numbers=(1, 2, 3)
    )


def _epochs(run: RunData, name: str) -> str:
    value = run.metrics.last(f"epoch/{name.removeprefix('tokens/')}")
    return "" if value is None else f"{value:.3g}"


def experts(runs: Sequence[RunData]) -> str:
    """The newest load of every expert, the fullest one of each block over time, and the curves of the router."""
    names = ("expert_load_max", "dead_experts", "dropped_tokens", "load_balancing_loss", "z_loss")
    curves = grid(small_charts(runs, names))
    loads = runs[0].metrics.tables["expert_load"].rows() if len(runs) == 1 else []
    return (_loads(loads) if loads else "") + curves


def _loads(loads: Sequence[tuple[int, dict[str, Any]]]) -> str:
    iteration, newest = loads[-1]
    blocks = [block for block in newest if _shares(newest[block])][:MOST_ROWS]
    if not blocks:
        return ""
    names = [_block(block) for block in blocks]
    shares = [_shares(newest[block]) for block in blocks]
    tips = [f"{name}: {_extremes(one)}" for name, one in zip(names, shares, strict=True)]
    cells = [_cells(one, max(8, MOST_SQUARES // len(blocks))) for one in shares]
    now = heat(f"load of experts at iteration {iteration}", names, cells, tips, "experts, in order")
    some = spread(loads, MOST_SQUARES // len(blocks))
    fullest = [[max(one) * len(one) / 4 for _, table in some if (one := _shares(table.get(block)))] for block in blocks]
    over = heat("fullest expert of each block over iterations", names, fullest, tips, "iterations")
    return figure(f"Load of each expert at iteration {iteration:,}; half colour is an even share", now) + figure(
        "The fullest expert of each block over time; full colour is 4 times an even share", over
    )


def spread[T](found: Sequence[T], most: int) -> list[T]:
    """At most so many of them, the first and the last included."""
    if len(found) <= most:
        return list(found)
    return [found[round(place * (len(found) - 1) / (most - 1))] for place in range(most)] if most > 1 else [found[-1]]


def _block(name: str) -> str:
    return f"block {name}" if name.isdecimal() else name[:24]


def _shares(value: Any) -> list[float]:
    if not isinstance(value, list) or not all(isinstance(one, int | float) and 0 <= one <= 1 for one in value):
        return []
    return value


def _extremes(shares: Sequence[float]) -> str:
    order = sorted(range(len(shares)), key=shares.__getitem__)
    said = [f"expert {number} {shares[number] * len(shares):.2f}x" for number in (*order[:-4:-1], order[0])]
    return f"fullest {', '.join(said[:-1])}; emptiest {said[-1]}"


def _cells(shares: Sequence[float], most: int) -> list[float]:
    """An even share is half the colour. Of more experts than cells, the fullest of neighbours."""
    several = math.ceil(len(shares) / most)
    return [max(shares[first : first + several]) * len(shares) / 2 for first in range(0, len(shares), several)]


def layers(runs: Sequence[RunData]) -> str:
    """Tables with a number for each block (``layer_*``): over time, each scaled by its own largest value."""
    if len(runs) != 1:
        return ""
    tables = ((name, spread.rows()) for name, spread in runs[0].metrics.tables.items() if name != "expert_load")
    return "".join([_layer(name, found) for name, found in tables if found][:MOST_PICTURES])


def _layer(name: str, found: Sequence[tuple[int, dict[str, Any]]]) -> str:
    blocks = [block for block, value in found[-1][1].items() if _finite(value)][:MOST_ROWS]
    some = spread(found, MOST_SQUARES // max(1, len(blocks)))
    values = [[table.get(block) for _, table in some] for block in blocks]
    top = max((abs(value) for row in values for value in row if _finite(value)), default=0.0)
    if not top:
        return ""
    cells = [[abs(value) / top if _finite(value) else 1.0 for value in row] for row in values]
    tips = [
        f"{_block(block)}: {row[-1]:.4g} at iteration {found[-1][0]}" for block, row in zip(blocks, values, strict=True)
    ]
    drawing = heat(f"{words_of(name)} over iterations", [_block(block) for block in blocks], cells, tips, "iterations")
    return figure(words_of(name), drawing, f"largest {top:.4g}")


def _finite(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and abs(value) < 1e300


def machines(runs: Sequence[RunData]) -> str:
    """What NVML and the nodes say."""
    return grid(small_charts(runs, MACHINE))
