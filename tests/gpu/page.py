"""The page: what was found, with bars of time and memory. One file: no script, no network, light and dark."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

from tests.gpu.report_text import WORDS, gist, summary
from tools.shared import chart

FIRST, SECOND = "#4472b0", "#d08a2e"
"""Of what is predicted or off, and of what is measured or on."""
STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 1120px; margin: 2em auto; padding: 0 1em; color: var(--ink);
  background: var(--page) }
h1 { font-size: 1.4em } h2 { font-size: 1.1em; margin-top: 2em }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; padding: .35em .8em .35em 0;
  border-bottom: 1px solid var(--grid); vertical-align: top; overflow-wrap: anywhere } tr :nth-child(3) {
  text-align: right } tr :nth-child(-n+3) { white-space: nowrap; overflow-wrap: normal }
pre { background: var(--soft); padding: .8em; overflow-x: auto; font-size: 12px } p { max-width: 80ch }
.failed { color: #c0392b; font-weight: bold } .passed { color: #2e8b57 } .unrun { color: var(--axis) }
@media (prefers-color-scheme: dark) { .failed { color: #ff7b6b } .passed { color: #66c48f } }
"""
WIDTH, NAMES, ROW = 1000.0, 260.0, 22.0
GIB = 2**30

Bars = Sequence[tuple[str, Sequence[tuple[float, str, str]]]]
"""Group -> its bars: length, colour, words behind it."""


def render(report: Mapping[str, Any]) -> str:
    """Of a report as in the JSON."""
    cards = report.get("gpus") or ["an unknown machine"]
    title = f"Triplane on {len(cards)} × {cards[0]}"
    parts = [f"<h1>{html.escape(title)}</h1>", *(f"<p>{html.escape(line)}</p>" for line in heading(report))]
    parts += [verdicts(report), *charts(report["subjects"])]
    for name, record in report["subjects"].items():
        parts.append(f"<h2>{html.escape(name + elsewhere(record, report))}</h2>{details(record)}")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{html.escape(title)}</title>'
        f"<style>{chart.STYLE}{STYLE}</style></head>\n<body>{chr(10).join(parts)}</body></html>\n"
    )


def heading(report: Mapping[str, Any]) -> list[str]:
    """When, what and how much of it passed; what is not a card's says so."""
    versions = ", ".join(f"{name} {version}" for name, version in report.get("versions", {}).items() if version)
    lines = [f"{report.get('date', 'no date')}, commit {report.get('commit', 'unknown')}; {versions}"]
    lines.append(summary(report))
    if report.get("driver") is None:
        lines.append("NOT A CARD'S: no NVIDIA driver answered. Nothing here says what a GPU does.")
    if report.get("size") != "card":
        lines.append(f"size = {report.get('size')}: toy models. Times and rates mean nothing.")
    return lines


def verdicts(report: Mapping[str, Any]) -> str:
    """A row for each subject."""
    rows = ["<tr><th>subject</th><th>verdict</th><th>s</th><th>what it shows, and found</th></tr>"]
    for name, record in report["subjects"].items():
        word = f'<span class="{record["verdict"]}">{WORDS[record["verdict"]]}</span>'
        found = f"{html.escape(record['shows'])}<br>{html.escape(gist(record))}"
        rows.append(f"<tr><td>{name}</td><td>{word}</td><td>{record['wall_s']:.0f}</td><td>{found}</td></tr>")
    return f"<table>{''.join(rows)}</table>"


def elsewhere(record: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    """Of what commit it is, or its rows are, where that is not the report's own."""
    found = {record.get("commit"), *(row.get("commit") for row in record.get("rows", {}).values())}
    others = sorted(found - {None, report.get("commit")})
    return f" (of commit {', '.join(others)})" if others else ""


def details(record: Mapping[str, Any]) -> str:
    """All that the subject said."""
    lines = [*record["lines"], *(f"PROBLEM {problem}" for problem in record["problems"])]
    lines += [f"not run: {record['unrun']}"] if record["unrun"] else []
    return f"<pre>{html.escape(chr(10).join(lines) or 'nothing')}</pre>"


def charts(subjects: Mapping[str, Any]) -> list[str]:
    """Of the subjects that have rows."""
    found = []
    if rows := rows_of(subjects, "throughput"):
        words = "Share of the published peak (MFU, causal) and of the fastest matrix product measured here."
        found += section("Throughput", words, bars(throughput_bars(rows), {"MFU": FIRST, "of GEMM": SECOND}, 1.0))
    if rows := rows_of(subjects, "planner"):
        picture = bars(step_bars(rows), {"predicted": FIRST, "measured": SECOND})
        found += section("Step time, seconds", "The planner's prediction, calibrated on this card.", picture)
    if rows := rows_of(subjects, "memory"):
        legend = {"predicted": FIRST, "measured": SECOND}
        found += section("Memory of a rank, GiB", "Tensors at the peak of a step.", bars(memory_bars(rows), legend))
    for name, heading in (("savings", "What saves memory"), ("fusions", "Fusions")):
        if rows := rows_of(subjects, name):
            found += section(f"{heading}: seconds of a step", "", bars(switch_bars(rows), {"off": FIRST, "on": SECOND}))
    return found


def rows_of(subjects: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """What a subject measured, by row."""
    rows: Mapping[str, Any] = subjects.get(name, {}).get("numbers", {}).get("rows", {})
    return rows


def section(heading: str, words: str, picture: str) -> list[str]:
    """A chart under its heading."""
    return [f"<h2>{html.escape(heading)}</h2>", f"<p>{html.escape(words)}</p>" if words else "", picture]


def throughput_bars(rows: Mapping[str, Any]) -> Bars:
    found = []
    for name, row in rows.items():
        rate = f"{row['tokens_per_s_per_gpu']:,.0f} tokens/s a GPU"
        shares = [("MFU", row["mfu"], FIRST), ("of GEMM", row["of_gemm"], SECOND)]
        known = [(share, colour, f"{share:.1%} {what}, {rate}") for what, share, colour in shares if share is not None]
        found.append((f"{name}: {row['shape']}, {row['layers']} layers", known))
    return found


def step_bars(rows: Mapping[str, Any]) -> Bars:
    return [
        (name, [(row[f"{what}_s"], colour, f"{row[f'{what}_s']:.4g} s {what}")
                for what, colour in (("predicted", FIRST), ("measured", SECOND))])
        for name, row in rows.items()
    ]  # fmt: skip


def memory_bars(rows: Mapping[str, Any]) -> Bars:
    found = []
    for row in rows.values():
        predicted, measured = row["predicted"]["tensors"] / GIB, row["measured"]["total"] / GIB
        both = [(predicted, FIRST, f"{predicted:.3g} predicted"), (measured, SECOND, f"{measured:.3g} measured")]
        found.append((f"{row['shape']}, {row['layers']} layers", both))
    return found


def switch_bars(rows: Mapping[str, Any]) -> Bars:
    return [
        (name, [(row["off_s"], FIRST, f"{row['off_s']:.4g} s off"),
                (row["on_s"], SECOND, f"{row['on_s']:.4g} s on, {row['bytes'] / 2**20:+,.0f} MiB")])
        for name, row in rows.items()
    ]  # fmt: skip


def bars(groups: Bars, legend: Mapping[str, str], longest: float | None = None) -> str:
    """Lying bars in groups; longest: the length that fills the chart, the longest bar's where None."""
    count = sum(len(group) for _, group in groups)
    drawing = chart.Drawing(WIDTH, 34 + ROW * count + 12 * len(groups))
    chart.legend(drawing, NAMES, 16, list(legend), WIDTH - NAMES, legend)
    most = longest or max((length for _, group in groups for length, _, _ in group), default=1.0) or 1.0
    y = 30.0
    for name, group in groups:
        drawing.text(NAMES - 10, y + ROW * max(1, len(group)) / 2 + 4, name, anchor="end")
        for length, colour, words in group:
            wide = length / most * (WIDTH - NAMES - 270)
            drawing.rect(NAMES, y + 2, wide, ROW - 4, colour, f"{name}: {words}")
            drawing.text(NAMES + wide + 8, y + ROW - 6, words)
            y += ROW
        y += 12
    return drawing.render()
