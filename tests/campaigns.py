"""Run every test and every campaign that needs no GPU, and write what came of them to docs/benchmarks/test_all.json.

    python -m tests.campaigns [--workers 2] [--only tests oracle faults soak monitoring] [--output FILE]

tests: pytest with --campaign, layouts and tests/gpu_path among them. Each of the others is a program of its own, which
goes on where it was interrupted; monitoring is left out where Prometheus is not installed. Hours.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args
from xml.etree import ElementTree

from program import command
from program.flags import parse_flags
from tests.benchmarks.circumstances import ROOT, circumstances, keep, versions

Campaign = Literal["tests", "oracle", "faults", "soak", "monitoring"]
PROGRAMS: dict[Campaign, str] = {
    "tests": "-m pytest --campaign --dist loadfile --no-loadscope-reorder",
    "oracle": "-m tests.oracle --cases 400 --write_page",
    "faults": "-m tests.faults",
    "soak": "-m tests.faults.soak --minutes 30",
    "monitoring": "-m tests.monitoring",
}
ENDS = {"failure": "failed", "error": "failed", "skipped": "skipped"}


@dataclass(kw_only=True)
class Campaigns:
    """Run every test and every campaign that needs no GPU."""

    workers: int = 2
    """Processes that files of tests are dealt to; 1 to 2 cores each."""

    only: tuple[Campaign, ...] = get_args(Campaign)
    """Which, in this order."""

    output: Path = ROOT / "docs/benchmarks/test_all.json"
    """Of each its command, exit code and seconds; of tests the counts of each folder."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 where one of them failed."""
    job = parse_flags(Campaigns, argv, "python -m tests.campaigns", __doc__)
    found = circumstances()
    found["versions"] |= versions(("transformers", "pytest"))
    for name in job.only:
        found[name] = (
            {"left_out": "Prometheus is not installed"}
            if name == "monitoring" and not shutil.which("prometheus")
            else run(name, job.workers)
        )
        keep(job.output, found)
    print("\n".join(f"{name}: {found[name]}" for name in job.only))
    return int(any(found[name].get("exit_code") for name in job.only))


def run(name: Campaign, workers: int) -> dict[str, Any]:
    """One of them, whose output goes to the terminal."""
    words, start = PROGRAMS[name], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        more = ["-n", str(workers), f"--junit-xml={results}"] if name == "tests" else []
        code = subprocess.run([sys.executable, *words.split(), *more], cwd=ROOT).returncode
        counts = {"folders": by_folder(results)} if results.is_file() else {}
    return {"command": f"python {words}", "exit_code": code, "seconds": round(time.monotonic() - start), **counts}


def by_folder(results: Path) -> dict[str, dict[str, int]]:
    """Of pytest's XML: passed, failed and skipped tests of each folder, and their seconds."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    seconds: dict[str, float] = defaultdict(float)
    for case in ElementTree.parse(results).iter("testcase"):
        folder = "/".join(case.attrib["classname"].split(".")[:2])
        end = next((ENDS[child.tag] for child in case if child.tag in ENDS), "passed")
        counts[folder][end] += 1
        seconds[folder] += float(case.attrib["time"])
    return {folder: {**counts[folder], "seconds": round(seconds[folder])} for folder in sorted(counts)}


if __name__ == "__main__":
    raise SystemExit(command.run("tests.campaigns", main))
