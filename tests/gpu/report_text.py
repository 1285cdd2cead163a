"""A report in words, for the console and the page."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from program.printing import columns

WORDS = {"passed": "passed", "failed": "FAILED", "unrun": "not run"}
GIST = 140
"""Characters of what the table says of a subject."""


def table(report: Mapping[str, Any]) -> list[str]:
    """A line for each subject."""
    rows = [("subject", "verdict", "s", "")]
    for name, record in report["subjects"].items():
        rows.append((name, WORDS[record["verdict"]], f"{record['wall_s']:.0f}", gist(record)[:GIST]))
    return columns(rows, left=(0, 1, 3))


def gist(record: Mapping[str, Any]) -> str:
    """The first problem, else why it was not run, else its last line."""
    words = [*map(telling, record["problems"]), record["unrun"], record["headline"], *reversed(record["lines"])]
    late = f"; {len(record['late'])} of its parts had no time" if record["late"] else ""
    return next((text for text in words if text), "").strip() + late


def telling(problem: str) -> str:
    """One line of it: of the end of a process's output, the error that stands last."""
    first, *others = problem.strip().splitlines() or [""]
    errors = [line for line in others if re.match(r"[\w.]*(Error|Exception|Mistake|Fault)\w*: ", line)]
    return f"{first.split(': File ')[0][:60]}: {errors[-1]}" if errors else first


def summary(report: Mapping[str, Any]) -> str:
    """One line."""
    found = Counter(record["verdict"] for record in report["subjects"].values())
    counts = ", ".join(f"{found[verdict]} {word.lower()}" for verdict, word in WORDS.items())
    return f"{counts}; {report['wall_s'] / 60:.1f} of {report['minutes']:g} minutes"


def percent(share: float | None) -> str:
    """A share, where it is known."""
    return "?" if share is None else f"{share:.1%}"
