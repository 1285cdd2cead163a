"""Inject faults and write what came of them to docs/faults.md.

    python -m tests.faults [--only damages kills matrix disk jobs stages hostile bucket] [--count N] [--seed N]

    damages   files of a checkpoint changed in every way, on ranks that then load it
    kills     processes of a real run killed around saving, and the run started again
    matrix    saved in one layout, loaded in every other
    disk      full, out of inodes, read-only, gone
    jobs      under a private SLURM: killed and hung ranks, signals, lost nodes
    stages    random [[stage]] tables, killed at random moments, in other layouts
    hostile   files, flags and environments made to break things
    bucket    checkpoints on their way into a bucket: kills, and a server that fails

A campaign is a list of seeded cases; each leaves one result. The suite and its campaign run a few cases of each
through the same functions. The same seed and commit continue an interrupted campaign.
"""

import importlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Literal

from parallel import launch, output
from program import command
from program.flags import parse_flags
from tests.benchmarks.circumstances import ROOT, commit, now
from tests.faults import document
from tests.faults.results import Store

Campaign = Literal["damages", "kills", "matrix", "disk", "jobs", "stages", "hostile", "bucket"]
COUNTS: dict[Campaign, int] = {
    "damages": 500,
    "kills": 200,
    "matrix": 1000,
    "disk": 1000,
    "jobs": 1000,
    "stages": 30,
    "hostile": 2200,
    "bucket": 1010,
}
"""How many cases make docs/faults.md; of the matrix, the disk and the jobs, all there are."""


@dataclass(kw_only=True)
class Faults:
    """Inject faults and write what came of them to docs/faults.md."""

    only: tuple[Campaign, ...] = ("damages", "kills", "matrix", "disk", "jobs", "stages", "hostile", "bucket")
    """damages: changed files; kills: killed processes; matrix: every layout's checkpoint in every other; disk: full,
    read-only, gone; jobs: everything else, under a private SLURM; stages: random tables, killed; hostile: files, flags
    and surroundings made to break things; bucket: uploads that are killed, and a server that fails."""

    count: int | None = None
    """Cases of each campaign. None: as many as in docs/faults.md."""

    seed: int = 0
    """Decides what is injected where."""

    results: Path = ROOT / "runs/faults.jsonl"
    """What came of each case, a JSON object a line; cases that are in it are not done again."""

    mend: bool = False
    """Do again only what did not end as it must at an earlier commit; the document then names each commit."""

    output: Path = ROOT / "docs/faults.md"
    """The document; sections of campaigns that do not run stay as they are."""

    folder: Path | None = None
    """Where checkpoints are written and damaged. None: the system's temporary folder."""


@dataclass
class CampaignProgress:
    """A line every few seconds, with the time that is left. Called behind each case, by whichever process did it."""

    campaign: str
    todo: Sequence[str]
    store: Store
    console: int
    began_s: float = field(default_factory=time.monotonic)
    said_s: float = field(default_factory=time.monotonic)

    def __call__(self) -> None:
        now_s = time.monotonic()
        if now_s - self.said_s < 5:
            return
        self.said_s = now_s
        left, total = len(self.store.left(self.campaign, list(self.todo))), len(self.todo)
        left_s = (now_s - self.began_s) / max(1, total - left) * left
        os.write(self.console, f"{self.campaign}: {total - left} of {total}, {left_s:.0f} s left\n".encode())


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: everything was survived; 1: something was not, see the document."""
    job = parse_flags(Faults, argv, "python -m tests.faults", __doc__)
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # before torch is imported
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended, too
    document.check(job.output)
    store = Store(path=job.results, seed=job.seed, commit=commit(), date=now()[:10], mend=job.mend)
    wrong = 0
    try:
        for name in job.only:
            with tempfile.TemporaryDirectory(prefix="triplane-faults-", dir=job.folder) as scratch:
                wrong += campaign(name, job, store, Path(scratch))
    except KeyboardInterrupt:
        print("tests.faults: interrupted; the same command goes on where it was", file=sys.stderr)
        return 130
    return 1 if wrong else 0


def campaign(name: Campaign, job: Faults, store: Store, scratch: Path) -> int:
    """Do the rest of a campaign and write its section: how many cases were not as they must be."""
    (scratch / "logs").mkdir()
    with output.own_output(scratch / "logs", launch.Identity(), every_rank=False) as console:  # torch loads noisily
        module: ModuleType = importlib.import_module(f"tests.faults.{name}")
        count = job.count or COUNTS[name]
        cases = module.cases(count)
        todo = store.left(name, cases)
        progress = CampaignProgress(name, todo, store, 1 if console is None else console)
        if todo:
            module.run(todo, store, scratch, progress)
    found = {result.case: result for result in store.results(name)}
    results = [found[case] for case in cases if case in found]
    wrong = [result for result in results if result.problem]
    for result in wrong:
        print(f"{name}: {result.case}: {result.kind}: {result.problem}", file=sys.stderr)
    print(f"{name}: {len(results)} cases, {len(wrong)} not as they must be; {job.output}", flush=True)
    chosen = f" --count {len(cases)}" if len(cases) < COUNTS[name] and COUNTS[name] != 1000 else ""
    command = f"python -m tests.faults --only {name}{chosen} --seed {job.seed}{' --mend' * job.mend}"
    machine = f"{os.cpu_count()} cores, no GPU"
    table = module.table(results) if hasattr(module, "table") else ()
    section = document.section(module.TITLE, module.TEXT, command, machine, results, table)
    document.write(job.output, module.TITLE, section)
    return len(wrong)


if __name__ == "__main__":
    raise SystemExit(command.run("tests.faults", main))
