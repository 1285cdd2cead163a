"""What came of each case: JSON lines, so that a campaign that was interrupted goes on."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(kw_only=True, frozen=True)
class CaseResult:
    """Of one number."""

    seed: int
    kind: str
    """equal, refused, different, failed"""
    title: str
    kinds: list[str]
    words: list[str]
    furthest: dict[str, float]
    drawn_again: int
    seconds: float
    date: str
    commit: str


def read(path: Path) -> dict[int, CaseResult]:
    """By number; the last line of a number counts. A line that was cut off is left out."""
    found: dict[int, CaseResult] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            result = CaseResult(**json.loads(line))
        except ValueError:
            continue
        found[result.seed] = result
    return found


def add(path: Path, result: CaseResult) -> None:
    """A line, in one write."""
    with path.open("ab", buffering=0) as file:
        file.write((json.dumps(dataclasses.asdict(result)) + "\n").encode())
