"""Run every test and every campaign that needs no GPU, and write what came of them to docs/benchmarks/test_all.json.

    python -m tests.campaigns [--workers 2] [--only tests/training oracle] [--mend] [--output FILE]

Tests of each folder with --campaign, layouts and each file of tests/gpu_path among them; then the oracle, the faults,
two soaks, and monitoring where Prometheus is installed. Hours: a part that has ended is written down, and --mend goes
on behind it.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from program import command
from program.errors import UserError
from program.flags import parse_flags
from tests.benchmarks.circumstances import ROOT, circumstances, commit, earlier, keep, now, versions
from tests.faults.__main__ import COUNTS

PYTEST = "-m pytest --campaign --dist loadfile --no-loadscope-reorder"
PROGRAMS = {
    "oracle": "-m tests.oracle --cases 400 --mend --write_page",
    **{f"faults/{name}": f"-m tests.faults --only {name}" for name in COUNTS},
    "soak": "-m tests.faults.soak --minutes 30",
    "soak/bucket": "-m tests.faults.bucket_soak --minutes 30 --page docs/faults.md",
    "monitoring": "-m tests.monitoring",
}
LONGEST = "gpu_path"
"""A folder whose files are parts of their own: an hour that is interrupted would be lost."""
ENDS = {"failure": "failed", "error": "failed", "skipped": "skipped"}


@dataclass(kw_only=True)
class Campaigns:
    """Run every test and every campaign that needs no GPU."""

    workers: int = 2
    """Processes that files of tests are dealt to; 1 to 2 cores each."""

    only: tuple[str, ...] = ()
    """Which parts: folders of tests (tests/training), tests (files at the top), oracle, faults/kills and so on, soak,
    soak/bucket, monitoring. None: all, in this order."""

    mend: bool = False
    """Leave out what went well before, at whichever commit: whole parts, cases of the faults, and tests of a part that
    ended with failures. Each part names its commit and date, and what was mended at which other."""

    output: Path = ROOT / "docs/benchmarks/test_all.json"
    """Of each part its command, commit, date, exit code, seconds and, of tests, counts. Parts that do not run stay."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 where a part failed, now or, of those left out, before."""
    job = parse_flags(Campaigns, argv, "python -m tests.campaigns", __doc__)
    every = parts(job.workers)
    if unknown := [name for name in job.only if name not in every]:
        raise UserError(f"--only {' '.join(unknown)}: not one of {', '.join(every)}")
    found = circumstances() | {"parts": earlier(job.output).get("parts", {})}
    found["versions"] |= versions(("transformers", "pytest"))
    chosen, at = job.only or tuple(every), commit()  # before the results make the checkout differ from it
    for name in chosen:
        before = found["parts"].get(name, {}) if job.mend else {}
        if before.get("exit_code") != 0:
            mending = ["--mend"] * (job.mend and name.startswith("faults/"))
            words = [*every[name].split(), *mending]
            whole = before.get("exit_code") == 1 and isinstance(before.get("failed"), list)
            found["parts"][name] = mended(before, job.workers, at) if whole else run(name, words, at)
            keep(job.output, found)
    for name in chosen:
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in found["parts"][name].items()))
    return int(any(found["parts"][name].get("exit_code") for name in chosen))


def parts(workers: int) -> Mapping[str, str]:
    """Python's arguments for each part."""
    tests = ROOT / "tests"
    folders = sorted(folder.name for folder in tests.iterdir() if any(folder.rglob("test_*.py")))
    top = " ".join(sorted(f"tests/{path.name}" for path in tests.glob("test_*.py")))
    pytest = f"{PYTEST} -n {workers}"
    whole = {f"tests/{name}": f"{pytest} tests/{name}" for name in folders if name != LONGEST}
    by_file = {f"tests/{LONGEST}/{path.stem}": f"{pytest} --dist load tests/{LONGEST}/{path.name}"
               for path in sorted((tests / LONGEST).glob("test_*.py"))}  # fmt: skip
    return whole | {"tests": f"{pytest} {top}"} | by_file | PROGRAMS


def run(name: str, words: Sequence[str], at: str) -> dict[str, Any]:
    """One part, whose output goes to the terminal."""
    if name == "monitoring" and not shutil.which("prometheus"):
        return {"left_out": "Prometheus is not installed"}
    with tempfile.TemporaryDirectory() as folder:
        results, start = Path(folder) / "results.xml", time.monotonic()
        junit = [f"--junit-xml={results}"] if "pytest" in words else []
        code = subprocess.run([sys.executable, *words, *junit], cwd=ROOT).returncode
        seconds = round(time.monotonic() - start)
        tests = counts(results) if results.is_file() else {}
    ran = f"python {' '.join(words)}"
    return {"command": ran, "commit": at, "date": now(), "exit_code": code, "seconds": seconds, **tests}


def mended(part: Mapping[str, Any], workers: int, at: str) -> dict[str, Any]:
    """The tests of ``part``, which ran whole, that have failed, once more: all of them, or they stay failed."""
    again = run("tests", [*f"{PYTEST} -n {workers}".split(), *part["failed"]], at)
    left = again.get("failed", [])
    passed = [test for test in part["failed"] if test not in left]
    if again["exit_code"] not in (0, 1) or again.get("passed", 0) != len(passed):
        return dict(part)
    found = dict(part) | {"exit_code": int(bool(left)), "passed": part.get("passed", 0) + len(passed)}
    found |= {"mended": [*part.get("mended", []), {"commit": at, "date": now(), "passed": passed}]}
    return found | {"failed": left} if left else {key: value for key, value in found.items() if key != "failed"}


def counts(results: Path) -> dict[str, Any]:
    """Of pytest's XML: how many tests passed and were skipped, and which failed."""
    found: dict[str, list[str]] = {}
    for case in ElementTree.parse(results).iter("testcase"):
        end = next((ENDS[child.tag] for child in case if child.tag in ENDS), "passed")
        found.setdefault(end, []).append(f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}")
    return {end: tests if end == "failed" else len(tests) for end, tests in found.items()}


if __name__ == "__main__":
    raise SystemExit(command.run("tests.campaigns", main))
