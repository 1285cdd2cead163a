"""The page: one file that needs neither a network nor a script."""

from collections.abc import Sequence

from tools.report import curves, events, resources, summary, texts, time_spent, traces
from tools.report.markup import STYLE, escaped, grid, moment, section, table, value_text
from tools.report.run_data import RunData
from tools.shared import chart
from tools.shared.plot import Curve

MOST_CHARACTERS = 950_000
"""Of all sections: a page has less than a megabyte."""
LEAST_NEEDED = ("more", "layers", "evaluations", "experts", "machines", "events", "data", "samples")
"""Sections that make room where the page would be larger, in this order."""
LOSS = ("loss", "validation_loss")
OPTIMIZER = ("grad_norm", "learning_rate", "loss_scale", "param_norm", "zeros_in_grad")
SPEED = (
    "tokens_per_s_per_gpu",
    "tflops_per_gpu",
    "mfu",
    "hfu",
    "iteration_s",
    "exposed_communication",
    "pipeline_bubble",
)
UNSHOWN = (
    "time_s", "consumed_samples", "consumed_tokens", "eta_s", "memory_rank", "gpu_temperature_rank", "tokens_per_s",
    "skipped", "checkpoint_stall_s", "restarts",
)  # fmt: skip
"""Keys that other sections speak of, or that are no curves."""
SHOWN = (
    *LOSS, *OPTIMIZER, *SPEED, *UNSHOWN, *resources.MACHINE, "memory_gib", "batch_size", "data_wait_s", "goodput",
    "expert_load_max", "dead_experts", "dropped_tokens", "load_balancing_loss", "z_loss",
)  # fmt: skip


def render(runs: Sequence[RunData]) -> str:
    """One run, or several side by side. The first of several has the colour of a single one."""
    one = runs[0] if len(runs) == 1 else None
    title = one.name if one else " | ".join(run.name for run in runs)
    state = summary.summary(one) if one else summary.several(runs)
    parts = {
        "loss": ("Loss", _loss(runs), ""),
        "evaluations": ("Evaluations", texts.evaluations(runs), ""),
        "speed": ("Speed", _speed(runs), ""),
        "goodput": ("Where the time goes", time_spent.goodput_section(runs), GOODPUT),
        "memory": ("Memory", resources.memory(runs), ""),
        "data": ("Data", resources.data(runs), ""),
        "experts": ("Experts", resources.experts(runs), ""),
        "layers": (
            "Blocks",
            resources.layers(runs),
            "Each picture's darkest cell is its largest value; tips have numbers.",
        ),
        "machines": ("Machines", resources.machines(runs), ""),
        "pipeline": ("Pipeline", traces.pipeline(one) if one else "", ""),
        "profiles": ("Profile", traces.profiles(one) if one else "", ""),
        "samples": ("Text samples", texts.samples(one) if one else "", ""),
        "events": ("Events", events.event_table(one) if one else "", ""),
        "more": ("More metrics", texts.other_curves(runs, SHOWN), ""),
        "configuration": ("Configuration", _configuration(runs), ""),
        "versions": ("Versions", texts.version_table(runs), ""),
    }
    sections = {anchor: text for anchor, part in parts.items() if (text := section(anchor, part[0], part[1], part[2]))}
    for anchor in LEAST_NEEDED:
        if anchor in sections and sum(map(len, sections.values())) > MOST_CHARACTERS:
            sections[anchor] = section(anchor, parts[anchor][0], "<p>Left out: the page would be too large.</p>")
    links = "".join(f'<a href="#{anchor}">{escaped(parts[anchor][0])}</a>\n' for anchor in sections)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escaped(title)}</title>'
        f"<style>{chart.STYLE}{STYLE}</style></head>\n<body><h1>{escaped(title)}</h1>\n"
        f"<p class=quiet>Written {moment(runs[0].read_s)} UTC by python -m tools.report.</p>\n{state}"
        f"<nav>{links}</nav>\n{''.join(sections.values())}</body></html>\n"
    )


GOODPUT = (
    "productive: iterations that count in the end; lost: iterations that were done again, and what came after the last "
    "one that counts; restart: from a launch to its first step, from the last step to the end, and from a death to the "
    "next launch; idle: between a start that ended as asked and the next one."
)


def _loss(runs: Sequence[RunData]) -> str:
    marks = events.marks(runs[0]) if len(runs) == 1 else []
    lost = [
        Curve(
            name="done again after a restart", colour="var(--pale)", dash="4 3",
            points=[curves.Point(x, y) for x, y in zip(*gone, strict=True)],
        )
        for gone in (runs[0].metrics.lost[-20:] if len(runs) == 1 else ())
    ]  # fmt: skip
    keys = events.mark_names(marks) | ({"done again after a restart": "var(--pale)"} if lost else {})
    wide, narrow = (
        curves.chart(
            runs,
            LOSS[: 2 if len(runs) == 1 else 1],
            "Loss",
            small=small,
            smooth=True,
            over=curves.Overlay(marks=marks, curves=lost, names=keys),
            text="{:.4f}".format,
        )
        for small in (False, True)
    )
    main = f"<div class=wide>{wide}</div>\n<div class=narrow>{narrow}</div>\n" if wide else ""
    if len(runs) > 1:
        main += curves.chart(runs, LOSS[1:], "Validation loss", small=False, text="{:.4f}".format)
    named = [name for name in curves.all_names(runs) if name.startswith("validation_loss/")]
    caption = f"validation loss of {named[0].partition('/')[2]}" if len(named) == 1 else "validation losses"
    more = [curves.chart(runs, named[:12], caption)] if named else []
    mtp = [name for name in curves.all_names(runs) if name.startswith("mtp_loss")]
    more += [curves.chart(runs, mtp, "losses of multi-token prediction")] if mtp else []
    return main + grid([
        *more, curves.chart(runs, ["grad_norm"], "gradient norm", axis="log", smooth=True),
        *curves.small_charts(runs, OPTIMIZER[1:]),
    ])  # fmt: skip


def _speed(runs: Sequence[RunData]) -> str:
    return time_spent.budget_section(runs) + grid(curves.small_charts(runs, SPEED))


PLACES = ("data.cache_dir", "run_dir")
"""Paths, which change no result: left out where configurations are compared."""


def _configuration(runs: Sequence[RunData]) -> str:
    """Of several, a row for each field that is not the same in all of them."""
    if len(runs) == 1:
        return texts.configuration(runs[0])
    names = dict.fromkeys(name for run in runs for name in run.config if name not in PLACES)
    each = ((name, *(value_text(run.setting(name)) for run in runs)) for name in names)
    rows = [row for row in each if len(set(row[1:])) > 1]
    return table(("field", *(run.name for run in runs)), rows) or "<p>The configurations do not differ.</p>"
