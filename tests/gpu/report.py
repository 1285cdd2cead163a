"""What was found, on the console, as JSON and as a page."""

import json
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallel.durable import replace_file
from parallel.output import columns
from tests.gpu.machine import GpuMachine
from tests.gpu.runner import Budget, Subject

WORDS = {"passed": "passed", "failed": "FAILED", "unrun": "not run"}


@dataclass(kw_only=True)
class Report:
    """Of one machine; nothing is written where no driver answers."""

    folder: Path
    size: str
    minutes: float
    machine: dict[str, Any] = field(default_factory=dict)
    subjects: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None
    """Of the JSON; the page lies beside it."""
    wall_s: float = 0.0

    def know(self, machine: dict[str, Any], *, resume: bool) -> None:
        """The machine is known, and so is the name of the files; resume: what has passed in them is kept."""
        self.machine = machine
        found = GpuMachine.read(machine)
        if found.driver is None:
            return
        small = "" if self.size == "card" else f"-{self.size}"
        self.path = self.folder / f"gpu-{found.slug}-{machine['date'][:10]}{small}.json"
        if resume and self.path.exists():
            before = json.loads(self.path.read_text())
            if before["commit"] == machine["commit"]:
                kept = {name: one for name, one in before["subjects"].items() if one["verdict"] == "passed"}
                self.subjects = kept
            else:
                print(f"--resume: {self.path} is of commit {before['commit']}: nothing of it is kept")

    def has_passed(self, name: str) -> bool:
        """In the file that is continued."""
        return name in self.subjects

    def add(self, subject: Subject, record: dict[str, Any]) -> None:
        """A subject's record, printed and written."""
        self.subjects[subject.name] = record | {"shows": subject.shows}
        lines = [*record["lines"], *(f"PROBLEM {problem}" for problem in record["problems"])]
        lines += [f"not run: {record['unrun']}"] if record["unrun"] else []
        lines.append(f"{subject.name}: {WORDS[record['verdict']].upper()} ({record['wall_s']:.0f} s)")
        print("\n".join(f"  {line}" for line in lines), flush=True)
        self.write()

    def write(self) -> None:
        """Both files. A disk that takes neither does not stop the rest."""
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.path, (json.dumps(self.record(), indent=2) + "\n").encode())
        except OSError as error:
            print(f"warning: {self.path} cannot be written: {error}", file=sys.stderr, flush=True)

    def record(self) -> dict[str, Any]:
        """For the JSON."""
        own = {"size": self.size, "minutes": self.minutes, "wall_s": self.wall_s}
        return self.machine | own | {"subjects": self.subjects}

    def end(self, budget: Budget) -> None:
        """The table, and where the files are."""
        self.wall_s = time.monotonic() - budget.began
        self.write()
        print("\n".join(["", *table(self.record()), summary(self.record())]), flush=True)
        if self.path is not None:
            print(f"written: {self.path}\nPlease send it back: an issue of the project takes it as an attachment.")
        elif self.machine:
            print(f"nothing was written: {self.machine['gpus'][0]} has no NVIDIA driver (nvidia-smi)")

    @property
    def exit_code(self) -> int:
        """1 where a subject failed."""
        return int(any(record["verdict"] == "failed" for record in self.subjects.values()))


def table(report: Mapping[str, Any]) -> list[str]:
    """A line for each subject."""
    rows = [("subject", "verdict", "s", "")]
    for name, record in report["subjects"].items():
        rows.append((name, WORDS[record["verdict"]], f"{record['wall_s']:.0f}", gist(record)))
    return columns(rows, left=(0, 1, 3))


def gist(record: Mapping[str, Any]) -> str:
    """The first problem, else why it was not run, else its last line."""
    words = [*record["problems"], record["unrun"], record["headline"], *reversed(record["lines"])]
    said = next((text for text in words if text), "").strip().splitlines() or [""]
    late = f"; {len(record['late'])} of its parts had no time" if record["late"] else ""
    return said[0][:100] + late


def summary(report: Mapping[str, Any]) -> str:
    """One line."""
    found = Counter(record["verdict"] for record in report["subjects"].values())
    counts = ", ".join(f"{found[verdict]} {word.lower()}" for verdict, word in WORDS.items())
    return f"{counts}; {report['wall_s'] / 60:.1f} of {report['minutes']:g} minutes"
