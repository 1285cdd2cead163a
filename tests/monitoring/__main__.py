"""Ask a real Prometheus what the dashboard and the alerts ask, and write what came of it to docs/benchmarks.

    python -m tests.monitoring [--mlflow /path/to/mlflow] [--output FILE]

Needs Debian's packages prometheus and prometheus-node-exporter. All servers listen on loopback alone. About 3 minutes.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from program import command
from program.errors import UserError
from program.flags import parse_flags
from tests.benchmarks.circumstances import ROOT, circumstances, keep, versions
from tests.monitoring import queries
from tests.monitoring.mlflow_server import hung_server, real_server
from tests.monitoring.scraped import scraped_run

PROGRAMS = ("prometheus", "promtool", "prometheus-node-exporter")


@dataclass(kw_only=True)
class Monitoring:
    """Ask a real Prometheus what the dashboard and the alerts ask."""

    mlflow: Path | None = None
    """The program `mlflow` of an environment with the whole package, whose server is to be tried, too. None: not."""

    output: Path = ROOT / "docs/benchmarks/monitoring.json"
    """What was asked, and what was wrong."""


def main() -> int:
    """The exit code: 1 where an answer was wrong."""
    flags = parse_flags(Monitoring, sys.argv[1:], "python -m tests.monitoring")
    if lacking := [name for name in PROGRAMS if shutil.which(name) is None]:
        raise UserError(f"not installed: {', '.join(lacking)} (apt-get install prometheus prometheus-node-exporter).")
    wrong: dict[str, str] = {}
    asked: list[str] = []
    with tempfile.TemporaryDirectory(prefix="triplane-monitoring-") as name:
        for question, problem in everything(Path(name), flags.mlflow):
            asked.append(question)
            wrong |= {question: problem} if problem else {}
            print(
                f"{'WRONG' if problem else 'right'}  {question}" + (f"\n       {problem}" if problem else ""),
                flush=True,
            )
    found = circumstances()
    found["versions"] = found["versions"] | versions(("prometheus-client", "mlflow-skinny")) | program_versions()
    found |= {"asked": asked, "wrong": wrong}
    keep(flags.output, found)
    print(f"{len(asked)} asked, {len(wrong)} wrong; {flags.output}")
    return 1 if wrong else 0


def everything(folder: Path, mlflow: Path | None) -> Iterator[tuple[str, str]]:
    """Each question of the campaign, and what is wrong with its answer."""
    for words in (["check", "rules", queries.ALERTS.name], ["test", "rules", queries.ALERTS_TEST.name]):
        done = subprocess.run(["promtool", *words], cwd=queries.MONITORING, capture_output=True, text=True)
        yield f"promtool {' '.join(words)}", "" if done.returncode == 0 else done.stdout + done.stderr
    yield from scraped_run(folder)
    yield from hung_server(folder / "hung")
    if mlflow is not None:
        yield from real_server(folder / "real", mlflow)


def program_versions() -> dict[str, str | None]:
    """Of Prometheus and node_exporter, as they print them."""
    found: dict[str, str | None] = {}
    for name in ("prometheus", "prometheus-node-exporter"):
        done = subprocess.run([name, "--version"], capture_output=True, text=True)
        match = re.search(r"version (\S+)", done.stdout + done.stderr)
        found[name] = match[1].rstrip(",") if match else None
    return found


if __name__ == "__main__":
    raise SystemExit(command.run("tests.monitoring", main))
