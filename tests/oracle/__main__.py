"""Hold drawn recipes against an oracle that is not ours, and write what came of them.

    python -m tests.oracle --cases 400 --output runs/oracle [--write_page] [--mend]

DIR/results.jsonl has a line for each case; the same command continues. The page goes to DIR/oracle.md, and to
docs/oracle.md with --write_page. A single case: --first N --cases 1.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from program import command
from program.flags import parse_flags
from tests.benchmarks.circumstances import ROOT, commit, now

SHOWN = 6


@dataclass(kw_only=True)
class OracleJob:
    """Hold drawn recipes against an oracle that is not ours."""

    cases: int = 400
    """How many; their numbers count from ``first`` on."""

    first: int = 0
    """Number of the first case."""

    output: Path = ROOT / "runs/oracle"
    """Folder for results.jsonl and oracle.md."""

    mend: bool = False
    """Do again what was different or failed."""

    write_page: bool = False
    """Write docs/oracle.md as well."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: every case is equal or was refused; 1: see the page."""
    job = parse_flags(OracleJob, argv, "python -m tests.oracle", __doc__)
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TQDM_DISABLE": "1"}  # before torch is imported
    from tests.oracle import campaign, page, results

    job.output.mkdir(parents=True, exist_ok=True)
    path, numbers = job.output / "results.jsonl", range(job.first, job.first + job.cases)
    known = results.read(path)
    done = [known[number] for number in numbers if number in known]
    left = [number for number in numbers if number not in known]
    left += [one.seed for one in done if job.mend and one.kind in ("different", "failed")]
    began, stamp = time.monotonic(), (now()[:10], commit())
    for count, number in enumerate(left, 1):
        result = campaign.run(number, *stamp)
        results.add(path, result)
        for line in [result.title, *result.words[:SHOWN]] if result.kind in ("different", "failed") else ():
            print(f"  {line}", flush=True)
        left_s = (time.monotonic() - began) / count * (len(left) - count)
        print(f"{count} of {len(left)}: case {number} {result.kind}; {left_s:.0f} s left", flush=True)
    known = results.read(path)
    found = [known[number] for number in numbers]
    text = page.page(found, f"python -m tests.oracle --cases {job.cases}")
    for target in [job.output / "oracle.md", *([ROOT / "docs/oracle.md"] if job.write_page else [])]:
        target.write_text(text)
    counts = {kind: sum(one.kind == kind for one in found) for kind in page.ENDS}
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return int(counts["different"] + counts["failed"] > 0)


if __name__ == "__main__":
    raise SystemExit(command.run("tests.oracle", main))
