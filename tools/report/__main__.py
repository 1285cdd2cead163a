"""Write a page about a run, or about several side by side, from what lies in their folders.

    python -m tools.report RUN_DIR [RUN_DIR ...] [--output FILE]
    python -m tools.report RUN_DIR --bundle [FILE.tar.gz]

The page is one file without a script that needs no network; it can be written while the run goes on. Runs write it
themselves when they end (log.report). --bundle collects what a bug report needs, without secrets.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import tyro

from program import command
from program.errors import UserError
from program.flags import parse_flags
from tools.report.page import render
from tools.report.run_data import read_run, shown_name
from tools.shared.written import check_file, marked, write_file

PAGE, PAGE_OF_SEVERAL = "report.html", "comparison.html"


@dataclass(kw_only=True)
class WriteReport:
    """Write a page about a run, or about several side by side."""

    run_dirs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs."""

    output: Path | None = None
    """The page. None: report.html in the run's folder; of several runs, comparison.html in the first one's."""

    bundle: Path | None = None
    """Write no page but this archive (.tar.gz): logs, stacks, verdicts, metrics, versions and configuration of one run,
    for a bug report. Without a name: RUN_DIR-bundle.tar.gz beside the folder. What looks like a secret is replaced."""


def with_bundle_name(arguments: Sequence[str]) -> list[str]:
    """--bundle without a name, at the end or before another flag, gets "." as its name: the usual one."""
    found: list[str] = []
    for argument, behind in pairwise([*arguments, "--"]):
        found += [argument, "."] if argument == "--bundle" and behind.startswith("--") else [argument]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: written."""
    job = parse_flags(
        WriteReport, with_bundle_name(sys.argv[1:] if argv is None else argv), "python -m tools.report", __doc__
    )
    try:
        if not job.run_dirs:
            raise UserError("no run's folder is given. Expected: python -m tools.report RUN_DIR [RUN_DIR ...]")
        if job.bundle is not None:
            from tools.report.bundle import write_bundle

            print(write_bundle(job.run_dirs, job.bundle))
            return 0
        path = job.output or job.run_dirs[0] / (PAGE if len(job.run_dirs) == 1 else PAGE_OF_SEVERAL)
        place = path, "--output" if job.output else "", marked("by python -m tools.report."), (PAGE, PAGE_OF_SEVERAL)
        check_file(*place)
        text = render(shown_name([read_run(folder) for folder in job.run_dirs]))
        write_file(path, text.encode(errors="replace"), *place[1:])
        print(f"{path}: {len(text) / 1e3:,.0f} kB")
        return 0
    except UserError as error:
        print(f"tools.report: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(command.run("tools.report", main))
