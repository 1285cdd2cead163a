"""Prove on a machine with one or more GPUs what no CPU can show, and write it to one JSON.

python -m tests.gpu [--subjects specs fp8 tests layouts throughput]
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from parallel import command, launch
from parallel.errors import UserError
from parallel.flags import parse_flags
from tools.benchmark.circumstances import ROOT

Subject = Literal["specs", "fp8", "tests", "layouts", "throughput"]


@dataclass(kw_only=True)
class ProveGpu:
    """Prove Triplane on GPUs."""

    subjects: tuple[Subject, ...] = ("specs", "fp8", "tests", "layouts", "throughput")
    """specs: Transformer Engine's modules against ours; fp8: against bf16; tests: pytest -m gpu; layouts:
    TP, PP and DP against one rank; throughput: tokens/s, MFU and memory."""

    output: Path = ROOT / "docs/benchmarks"
    """Folder for gpu-NAME-DATE.json."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: every subject passed or cannot be tried here; 1: one failed; 2: no GPU."""
    job = parse_flags(ProveGpu, argv, "python -m tests.gpu", __doc__)
    try:
        require_gpu()
    except UserError as error:
        print(f"tests.gpu: {error}", file=sys.stderr)
        return 2
    return prove(job)


def require_gpu() -> None:
    """Raises UserError where there is no GPU, or torch cannot use it."""
    if not launch.count_gpus(os.environ):
        raise UserError("no GPU was found here: nothing is proved. Run it on a machine with one or more NVIDIA GPUs.")
    launch.choose_device("cuda", os.environ)


def prove(job: ProveGpu) -> int:
    """Every subject in turn; the JSON is written after each, so that nothing is lost.

    Nothing is written where no driver answers: what an emulated device shows (tests/gpu_path) is not a card's.
    """
    from tests.gpu import machine, subjects

    found = machine.look()
    print("\n".join(found.lines()), flush=True)
    report: dict[str, Any] = found.record() | {"subjects": {}}
    path = job.output / f"gpu-{found.slug}-{report['date'][:10]}.json"
    for subject in job.subjects:
        print(f"{subject} ...", flush=True)
        began = time.monotonic()
        verdict, outcome = subjects.guarded(subject, found)
        wall_s = time.monotonic() - began
        lines = [*outcome.lines, *(f"PROBLEM {problem}" for problem in outcome.problems)]
        print(
            "\n".join(f"  {line}" for line in [*lines, f"{subject}: {verdict.upper()} ({wall_s:.0f} s)"]),
            flush=True,
        )
        report["subjects"][subject] = subjects.record(verdict, outcome) | {"wall_s": wall_s}
        if found.driver:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(report, indent=2) + "\n")
    print(path if found.driver else f"nothing was written: {found.gpus[0]} has no NVIDIA driver (nvidia-smi)")
    return int(any(entry["verdict"] == "failed" for entry in report["subjects"].values()))


if __name__ == "__main__":
    raise SystemExit(command.run("tests.gpu", main))
