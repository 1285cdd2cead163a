"""Measure what Triplane promises of a CPU, and write it to docs/benchmarks/cpu.json.

    python -m tests.benchmarks step [--subjects one_rank startup answers sharded]

Ratios compare two sides within one run; CPU seconds bear other programs better than wall seconds do.
"""

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from parallel import launch, output
from program.flags import parse_flags
from tests.benchmarks.circumstances import ROOT, circumstances, earlier, keep
from tests.benchmarks.step import startup

Subject = Literal["one_rank", "startup", "answers", "sharded"]


@dataclass(kw_only=True)
class StepBenchmark:
    """Measure Triplane on the CPU."""

    subjects: tuple[Subject, ...] = ("answers", "startup", "one_rank", "sharded")
    """answers: --help, --dry_run; startup: ranks' first step; one_rank: a step against plain PyTorch; sharded: ZeRO-3
    against ZeRO-1, a step and memory."""

    steps: int = 20
    """Timed steps of each side of one_rank, after 2 of warm-up."""

    nproc: int = 8
    """Ranks of startup; a multiple of the demo's TP 2 x PP 2."""

    output: Path = ROOT / "docs/benchmarks/cpu.json"
    """JSON with one entry per subject; subjects that are not measured keep theirs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: measured, whether the goals were met or not; 1: a subject failed."""
    job = parse_flags(StepBenchmark, argv, "python -m tests.benchmarks step", __doc__)
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # before torch is imported
    results = earlier(job.output)
    failed = False
    for subject in job.subjects:
        print(f"{subject} ...", flush=True)
        try:
            measured = measure(subject, job)
        except Exception as error:  # the other subjects are still worth measuring
            print(f"{subject} failed: {error}", file=sys.stderr)
            failed = True
            continue
        print("\n".join(table(subject, measured)), flush=True)
        results[subject] = circumstances() | {"results": measured}
        keep(job.output, results)
    return int(failed)


def measure(subject: Subject, job: StepBenchmark) -> dict[str, Any]:
    """One subject's numbers."""
    if subject == "answers":
        return startup.answers()
    if subject == "startup":
        return startup.first_step(job.nproc)
    logs = tempfile.TemporaryDirectory(prefix="triplane-benchmark-")
    with logs, output.own_output(Path(logs.name), launch.Identity(), every_rank=False):  # torch loads noisily
        from tests.benchmarks.step import one_rank, sharded

        if subject == "sharded":
            return sharded.measure()
        measured = one_rank.measure(one_rank.configuration(), job.steps)
    first, second = measured.pop("losses")
    measured["largest_loss_difference"] = max(abs(a - b) for a, b in zip(first, second, strict=True))
    return measured


def table(subject: Subject, measured: dict[str, Any]) -> list[str]:
    """The numbers as lines, each with its goal."""
    if subject == "answers":
        return [
            line(name, f"{row['wall_s']:.2f} s wall, {row['cpu_s']:.2f} s CPU", row["wall_s"], row["goal"])
            for name, row in measured.items()
        ]
    if subject == "sharded":
        return _sharded(measured)
    left, right = ("forked", "torchrun") if subject == "startup" else ("triplane", "plain")
    lines = []
    for clock in ("cpu", "wall"):
        ours_s, theirs_s = measured[f"{left}_{clock}_s"], measured[f"{right}_{clock}_s"]
        ratio = ours_s / theirs_s
        text = f"{left} {ours_s:.2f} s, {right} {theirs_s:.2f} s, ratio {ratio:.3f}"
        # Starting up is measured in CPU seconds: ranks that share cores wait for each other.
        goal = None if subject == "startup" and clock == "wall" else measured["goal"]
        lines.append(line(f"{clock} time", text, ratio, goal))
    return lines


def _sharded(measured: dict[str, Any]) -> list[str]:
    text = f"ZeRO-3 {measured['zero3_cpu_s']:.2f} s, ZeRO-1 {measured['zero1_cpu_s']:.2f} s"
    lines = [line("cpu time", f"{text}, ratio {measured['ratio_cpu']:.3f}", measured["ratio_cpu"], measured["goal"])]
    for side, held in measured["memory"].items():
        text = f"{held['building_mib']:.0f} MiB at most, {held['built_mib']:.0f} kept; {held['step_mib']:.0f} in steps"
        lines.append(f"  {side:18} while building {text}")
    shard = measured["parameters_mib"] / measured["memory_ranks"]
    return [
        *lines,
        f"  {measured['memory_ranks']} ranks; a shard {shard:.0f} MiB, largest unit {measured['unit_mib']:.0f}",
    ]


def line(name: str, text: str, value: float, goal: float | None) -> str:
    verdict = "" if goal is None else f"goal {goal:.2f}: {'met' if value <= goal else 'MISSED'}"
    return f"  {name:14} {text:54} {verdict}".rstrip()
