"""What came of each injected fault: JSON lines, so that a campaign that was interrupted goes on."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(kw_only=True, slots=True, frozen=True)
class CaseResult:
    """One fault and what was seen."""

    campaign: str
    case: str
    """Unique within a campaign and a seed."""
    kind: str
    """What was injected: a row of the table in docs/faults.md."""
    outcome: str
    """What was seen, in a few words: results with the same words are counted together."""
    seconds: float
    """Until everything was as it should be again."""
    problem: str = ""
    """What was not as it should be; empty when all was."""
    date: str = ""
    commit: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    """More columns, for campaigns with a table of their own."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Store:
    """A file of results. Those of another seed or another commit do not count, but as ``mend`` says."""

    path: Path
    seed: int
    commit: str
    date: str
    mend: bool = False
    """What went well at whichever commit counts, and what did not is left to be done again."""

    def add(self, result: CaseResult) -> None:
        """Append a line; whole, since a short line is one write."""
        stamped = dataclasses.replace(result, date=self.date, commit=self.commit)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"seed": self.seed, **dataclasses.asdict(stamped)}) + "\n"
        with self.path.open("ab", buffering=0) as file:
            file.write(line.encode())

    def results(self, campaign: str) -> list[CaseResult]:
        """Of this campaign, in the order in which they came; the last one of a case counts."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        found: dict[str, CaseResult] = {}
        for line in lines:
            values = json.loads(line)
            same = values["commit"] == self.commit or (self.mend and not values["problem"])
            if values.pop("seed") == self.seed and same and values["campaign"] == campaign:
                found[values["case"]] = CaseResult(**values)
        return list(found.values())

    def left(self, campaign: str, cases: list[str]) -> list[str]:
        """The cases without a result."""
        done = {result.case for result in self.results(campaign)}
        return [case for case in cases if case not in done]
