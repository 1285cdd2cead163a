"""What was found, on the console, as JSON and as a page."""

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from program.durable import replace_file
from program.untrusted import read_json
from tests.gpu import page
from tests.gpu.machine import GpuMachine
from tests.gpu.report_text import WORDS, summary, table
from tests.gpu.runner import Budget, Subject


@dataclass(kw_only=True)
class Report:
    """Of one machine; nothing is written where no driver answers."""

    folder: Path
    size: str
    minutes: float
    machine: dict[str, Any] = field(default_factory=dict)
    subjects: dict[str, Any] = field(default_factory=dict)
    before: dict[str, Any] = field(default_factory=dict)
    """Subject -> its record in the report that is continued."""
    path: Path | None = None
    """Of the JSON; the page lies beside it."""
    wall_s: float = 0.0

    def know(self, machine: dict[str, Any], *, resume: bool) -> None:
        """The machine is known, and so is the name of the files. resume: the newest report of these cards and libraries
        in the folder is continued; else no file that is there is replaced."""
        self.machine = machine
        found = GpuMachine.read(machine)
        if found.driver is None:
            return
        small = "" if self.size == "card" else f"-{self.size}"
        dated = f"gpu-{found.slug}-{machine['date'][:10]}{small}"
        of_these_cards = self.folder.glob(f"gpu-{found.slug}-20[0-9][0-9]-*.json")
        earlier = [path for path in of_these_cards if path.stem.endswith("-tiny") == bool(small)]
        newest = max(earlier, key=lambda path: path.stat().st_mtime, default=None)
        if resume and newest and self.keep(newest):
            self.path = newest
        else:
            names = (dated, *(f"{dated.removesuffix(small)}-{number}{small}" for number in range(2, 100)))
            self.path = next(path for name in names if not (path := self.folder / f"{name}.json").exists())

    def keep(self, path: Path) -> bool:
        """What was found before, if by the same libraries: rows of another commit keep its name."""
        before = read_json(path)
        if before["versions"] != self.machine["versions"]:
            print(f"--resume: {path} is of other libraries: it stays as it is, and nothing of it is kept")
            return False
        for record in before["subjects"].values():
            record.setdefault("commit", before["commit"])
        self.before = before["subjects"]
        self.subjects = dict(self.before)
        return True

    def add(self, subject: Subject, record: dict[str, Any]) -> None:
        """A subject's record, printed and written; rows that were kept have their own commit."""
        for row in record["rows"].values():
            row.setdefault("commit", self.machine.get("commit", "unknown"))
        self.subjects[subject.name] = record | {"shows": subject.shows, "commit": self.machine.get("commit", "unknown")}
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
            replace_file(self.path.with_suffix(".html"), page.render(self.record()).encode())
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
            print(f"written: {self.path} and {self.path.with_suffix('.html').name} beside it: please send both back")
        elif self.machine:
            print(f"nothing was written: {self.machine['gpus'][0]} has no NVIDIA driver (nvidia-smi)")

    @property
    def exit_code(self) -> int:
        """1 where a subject failed."""
        return int(any(record["verdict"] == "failed" for record in self.subjects.values()))
