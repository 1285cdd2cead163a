"""HTML from texts that are not trusted: every one is escaped here."""

import json
import time
from collections.abc import Iterable, Sequence

from tools.shared.chart import safe
from training.metrics.console import duration

MOST_CHARACTERS = 2000
"""Of a text within the page."""

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 1.5em auto; padding: 0 1em; color: var(--ink);
  background: var(--page) }
h1 { font-size: 1.45em; margin-bottom: .2em; overflow-wrap: anywhere } h2 { font-size: 1.15em; margin: 2em 0 .3em }
h3 { font-size: 1em; margin: 1.2em 0 .2em } p, li { max-width: 75ch; overflow-wrap: anywhere } figure { margin: 0 }
figcaption { font-size: 13px; margin-top: .8em } figcaption b { font-weight: 600 }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 320px), 1fr)); gap: .2em 1.2em }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: 13px; margin: .4em 0 }
th, td { text-align: left; padding: .25em .8em .25em 0; border-bottom: 1px solid var(--grid); vertical-align: top;
  overflow-wrap: anywhere } td.time { white-space: nowrap }
td.number, th.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums }
pre { background: var(--soft); padding: .7em; overflow-x: auto; font-size: 12px; white-space: pre-wrap;
  overflow-wrap: anywhere; margin: .3em 0 }
.good { color: var(--good) } .bad { color: var(--bad) } .warn { color: var(--warn) } .quiet { color: var(--axis) }
.state { font-weight: 600 } nav { font-size: 13px } nav a { color: inherit; margin-right: .9em }
summary { cursor: pointer }
@media print { nav { display: none } details > * { display: block } }
"""


def escaped(text: object) -> str:
    """For the page, cut where it is long, control characters spelled out."""
    words = str(text)
    words = words if len(words) <= MOST_CHARACTERS else f"{words[:MOST_CHARACTERS]} …"
    return safe(words)


def section(anchor: str, heading: str, body: str, words: str = "") -> str:
    """A part of the page; nothing where there is nothing to show. anchor: our own word; body: HTML."""
    said = f"<p>{escaped(words)}</p>\n" if words else ""
    return f'<section id="{anchor}"><h2>{escaped(heading)}</h2>\n{said}{body}</section>\n' if body else ""


def figure(caption: str, drawing: str, value: str = "") -> str:
    """A chart under its name; value: its newest number."""
    shown = f": {escaped(value)}" if value else ""
    return f"<figure><figcaption><b>{escaped(caption)}</b>{shown}</figcaption>{drawing}</figure>\n" if drawing else ""


def grid(figures: Iterable[str]) -> str:
    """Small charts side by side, below each other on a phone."""
    inner = "".join(figures)
    return f'<div class="grid">{inner}</div>\n' if inner else ""


def table(
    head: Sequence[str], rows: Iterable[Sequence[object]], numbers: Sequence[int] = (), times: Sequence[int] = ()
) -> str:
    """numbers: columns that are set to the right. times: columns whose words stay together."""
    kinds = dict.fromkeys(times, " class=time") | dict.fromkeys(numbers, " class=number")

    def cell(tag: str, place: int, text: object) -> str:
        return f"<{tag}{kinds.get(place, '')}>{escaped(text)}</{tag}>"

    lines = ["".join(cell("td", place, text) for place, text in enumerate(row)) for row in rows]
    if not lines:
        return ""
    top = "".join(cell("th", place, text) for place, text in enumerate(head))
    body = "".join(f"<tr>{line}</tr>\n" for line in [top, *lines])
    return f'<div class="scroll"><table>{body}</table></div>\n'


def bullets(items: Iterable[str], kind: str = "") -> str:
    """A list of sentences."""
    inner = "".join(f"<li{f' class={kind}' if kind else ''}>{escaped(item)}</li>\n" for item in items)
    return f"<ul>{inner}</ul>\n" if inner else ""


def moment(seconds: float) -> str:
    """Unix seconds as a date, UTC."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
    except (OverflowError, OSError, ValueError):
        return "an unknown time"


def lasting(seconds: float) -> str:
    """A duration in words; fractions of a minute's seconds where it is short."""
    return f"{seconds:.3g} s" if seconds < 20 else duration(seconds)


def counted(number: float, one: str, many: str = "") -> str:
    """1 start, 2 starts."""
    return f"{number:,.0f} {one if number == 1 else many or one + 's'}"


def figure_text(value: float) -> str:
    """A number in a sentence: 61,750 and 0.4139."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def value_text(value: object) -> str:
    """A field of a configuration as a recipe has it; "unset" for none."""
    if value is None:
        return "unset"
    return value if isinstance(value, str) else _toml(value)


def _toml(value: object) -> str:
    """A value within one line of TOML."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name} = {_toml(inner)}' for name, inner in value.items())}}}"
    return str(value).lower() if isinstance(value, bool) else str(value)
