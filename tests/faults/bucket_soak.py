"""Runs through stages, out of a bucket and into one, disturbed for as long as is asked: each ends as one that was not.

    python -m tests.faults.bucket_soak --minutes 30 [--seed N] [--folder runs/bucket_soak] [--page docs/faults.md]

One run after the other, of the seeds N, N + 1 and so on, until the time is over: --minutes 0 --seed N does one again.
Exit code 1 where one has not ended as it must.
"""

import ctypes
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from random import Random

import numpy as np

from data.shard_writer import ShardWriter
from program import command
from program.buckets import client, transfer
from program.flags import parse_flags
from tests.benchmarks.circumstances import ROOT, commit, now
from tests.faults import document, program, stages
from tests.faults.bucket_run import BucketRun, Happened
from tests.faults.bucket_scene import BucketScene, asked, scene
from tests.faults.processes import all_gone, children, kill
from tests.faults.results import CaseResult
from tests.faults.stage_plans import StagePlan, drawn
from tests.support import buckets

TITLE = "Stages out of a bucket, for half an hour"
TEXT = """One run after the other goes through 2 to 4 `[[stage]]` tables that a seed draws: blends, lengths of samples,
batches, curves, layouts, skipped ranges. Its shards are read out of a bucket, through the cache of blocks; its
checkpoints are copied into the bucket. Of all requests about one in five fails, throughout: errors, half bodies,
connections that end, answers that are lost; at some starts also listings as they were before, or expired and missing
rights. A rank, the launcher, the uploader or all processes get SIGKILL, or the run SIGTERM: in training, while blocks
come into an empty cache, while a checkpoint goes up. It is started again in another layout of 1 to 4 ranks, where its
stages have none of their own; one time in four as on another cluster: without its folder and the blocks, from the
bucket alone. After each start every checkpoint in the bucket must be whole, the newest that was said to be there must
be there still, and no process may be left. At its end the run must have taken, window by window, the samples that an
undisturbed run in one layout takes from the same shards on a disk; with the same rates and counters, and in fp32 losses
and, of the checkpoint in the bucket, weights within 2e-5 (relative). No file that it leaves may have a credential in
it."""
CORPORA = {"a": 24_000_000, "b": 16_000_000, "c": 20_000}
"""Tokens of two bytes, in blocks of 1 MiB; the last is read several times."""
LENGTHS = (14, 24)
PATIENCE_S = "60"
"""Of a run, with one request, before it ends."""
DENSE: Mapping[str, tuple[int, ...]] = {
    "1 rank": (1, 1, 1, 1, 1), "DP 2": (2, 1, 1, 1, 1), "TP 2": (2, 2, 1, 1, 1), "PP 2": (2, 1, 2, 1, 1),
    "CP 2": (2, 1, 1, 2, 1), "TP 2 x PP 2": (4, 2, 2, 1, 1), "TP 2 x DP 2": (4, 2, 1, 1, 1),
    "TP 2 x CP 2": (4, 2, 1, 2, 1), "PP 2 x DP 2": (4, 1, 2, 1, 1),
}  # fmt: skip
"""As ``BucketRun.layouts``."""
EXPERTS: Mapping[str, tuple[int, ...]] = {
    "1 rank": (1, 1, 1, 1, 1), "DP 2": (2, 1, 1, 1, 1), "EP 2": (2, 1, 1, 1, 2), "PP 2": (2, 1, 2, 1, 1),
    "CP 2": (2, 1, 1, 2, 1), "PP 2 x EP 2": (4, 1, 2, 1, 2), "CP 2 x EP 2": (4, 1, 1, 2, 2),
}  # fmt: skip
ALL_EXPERTS = ("--model.num_moe_experts", "2", "--model.moe_router_topk", "2", "--model.moe_ffn_hidden_size", "48")
"""Every token takes both: rounding, which differs between layouts, chooses none."""
PR_SET_CHILD_SUBREAPER = 36
"""prctl(2): whose parent has died becomes this process's child, so that nothing is left behind unseen."""


@dataclass(kw_only=True)
class BucketSoak:
    """Runs through stages, out of a bucket and into one, disturbed; each must end as an undisturbed one."""

    minutes: float = 30.0
    """As long as these are not over another run begins, one at least."""

    seed: int = 0
    """Of the first run; the next one has the next."""

    folder: Path = ROOT / "runs/bucket_soak"
    """Where they work; what was there is removed. A run that has not ended as it must stays."""

    page: Path | None = None
    """Also replace the section of that document (docs/faults.md)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: all runs have ended as undisturbed ones."""
    job = parse_flags(BucketSoak, argv, "python -m tests.faults.bucket_soak", __doc__)
    if job.page is not None:
        document.check(job.page)
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended, too
    shutil.rmtree(job.folder, ignore_errors=True)
    job.folder.mkdir(parents=True)
    folder, began_s, at = job.folder.resolve(), time.monotonic(), commit()  # before the page makes the checkout differ
    program.import_once(folder / "cache")
    write_corpora(folder / "corpus")
    results, counts = list[CaseResult](), Counter[Happened]()
    while not results or time.monotonic() - began_s < 60 * job.minutes:
        result, found = soaked(job.seed + len(results), folder)
        results.append(replace(result, date=now()[:10], commit=at))
        counts += found
        print(f"bucket_soak: seed {result.case}, {result.kind}: {result.outcome}, {result.seconds:.0f} s", flush=True)
        if result.problem:
            print(f"  NOT AS IT MUST BE: {result.problem}", file=sys.stderr, flush=True)
    text = section(job, results, counts)
    print(text)
    if job.page is not None:
        document.write(job.page, TITLE, text)
    return int(any(result.problem for result in results))


def section(job: BucketSoak, results: Sequence[CaseResult], counts: Counter[Happened]) -> str:
    """Of the document: how often what was seen."""
    said = f"python -m tests.faults.bucket_soak --minutes {job.minutes:g} --seed {job.seed}"
    seconds = [result.seconds for result in results]
    table = ["| Seen | How often |", "|---|---|"]
    table.append(f"| runs | {len(results)}: {sum(seconds):,.0f} s, the longest {max(seconds):,.0f} s |")
    for what, pairs in groupby(sorted(counts.items()), lambda pair: pair[0].what):
        table.append(f"| {what} | {', '.join(f'{number} {one.how}' for one, number in pairs)} |")
    return document.section(TITLE, TEXT, said, f"{os.cpu_count()} cores, no GPU", results, table)


def write_corpora(folder: Path) -> None:
    """Shards of random words, as bytes, so that no sample is like another."""
    folder.mkdir(parents=True)
    for name, size in CORPORA.items():
        draw = np.random.default_rng(ord(name))
        words = np.array(["".join(draw.choice([*"abcdefghijklmnop"], draw.integers(2, 9))) for _ in range(2000)])
        with ShardWriter(folder / name, 257) as writer:
            while writer.token_count < size:
                text = " ".join(draw.choice(words, 400)).encode()
                writer.add(np.append(np.frombuffer(text, np.uint8).astype(np.uint16), 256))
                writer.end_document()


def soaked(seed: int, folder: Path) -> tuple[CaseResult, Counter[Happened]]:
    """A run that is disturbed, beside one that is not: what came of it, and what happened."""
    own = folder / f"seed-{seed}"
    own.mkdir()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    began, counts = time.monotonic(), Counter[Happened]()
    try:
        with scene(own / "server", buckets.seaweed) as here:
            os.environ[client.PATIENCE] = PATIENCE_S
            kind, counts, problems = _run(seed, own, folder / "corpus", here)
    finally:
        left = children(os.getpid())
        gone = all_gone(left, 10)
        kill(left)
    problems += [] if gone else [f"processes are left: {left}"]
    if not problems:
        shutil.rmtree(own)
    outcome = "another end" if problems else "the same end"
    seconds, problem = time.monotonic() - began, "; ".join(problems)
    found = CaseResult(
        campaign="bucket_soak", case=str(seed), kind=kind, outcome=outcome, seconds=seconds, problem=problem,
    )  # fmt: skip
    return found, counts


def _run(seed: int, own: Path, corpus: Path, here: BucketScene) -> tuple[str, Counter[Happened], list[str]]:
    """Its kind, what happened, what is wrong."""
    draw, plans = Random(f"{seed} disturbed"), list[StagePlan]()
    for name, place in (("disk", f"{corpus}/{{}}"), ("bucket", here.url("corpus/{}"))):
        (own / name).mkdir()
        plans.append(drawn(f"{seed} soak", place, own / name, lengths=LENGTHS))
    on_disk, plan = plans
    experts = not plan.own_layouts and draw.random() < 0.4
    kind = plan.kind.replace("shards", "experts" if experts else "dense")
    layouts = {} if plan.own_layouts else EXPERTS if experts else DENSE
    run = BucketRun(
        scene=here, plan=plan, folder=own / "bucket", draw=draw, layouts=layouts, flags=ALL_EXPERTS if experts else ()
    )
    undisturbed, files = own / "disk" / "run", sorted(corpus.iterdir())
    if problems := stages.to_its_end(on_disk, undisturbed, 2 if plan.own_layouts else 1, *run.flags):
        return kind, run.counts, problems
    asked(here.scratch, lambda: [transfer.upload(path, here.url(f"corpus/{path.name}")).size for path in files])
    for _ in range(draw.randint(8, 14)):
        if not problems and not run.is_done:
            problems = run.disturbed()
    problems = problems or run.to_its_end() or run.differences(undisturbed)
    return kind, run.counts, [*problems, *run.count_failures(), *run.traces()]


if __name__ == "__main__":
    raise SystemExit(command.run("tests.faults.bucket_soak", main))
