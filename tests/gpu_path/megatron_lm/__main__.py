"""Megatron-LM's pretrain_gpt.py and ours on the emulated device: what a step asks of it, and the losses of twins.

    python -m tests.gpu_path.megatron_lm --megatron_lm CHECKOUT [--only steps]

Prints two tables and writes docs/benchmarks/megatron_lm.json. Exit code 1: ours has more calls or bytes, or losses of
twins differ by more than their bound.
"""

import collections
import dataclasses
import json
import runpy
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from program.flags import parse_flags
from tests.benchmarks.circumstances import circumstances
from tests.gpu_path.emulator import ROOT
from tests.gpu_path.megatron_lm.both import Log, Programs, programs, write_data
from tests.gpu_path.megatron_lm.cases import CONTROL, LAYOUTS, TWINS, Case
from tests.gpu_path.megatron_lm.twins import run_twin

REPORT = ROOT / "docs/benchmarks/megatron_lm.json"
SMALL_BYTES = 4096
WAITS = ("STREAM_WAITS", "DEVICE_WAITS", "EVENT_WAITS")


@dataclass(kw_only=True)
class Comparison:
    """Compare with Megatron-LM."""

    megatron_lm: Path
    """Its checkout."""
    only: Literal["steps", "twins"] | None = None
    """None: both. What is not compared keeps its entry in the report."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Of one iteration, all ranks together."""

    calls: int
    bytes: int
    """Of what collectives carry, but for experts' tokens, whose number depends on the weights."""
    small_all_reduces: int
    """Most of one rank, of at most 4,096 bytes."""
    kernels: int
    waits: int
    kinds: Mapping[str, int]
    """Calls by kind."""


def costs(logs: Sequence[Log]) -> StepCosts:
    """Of all ranks' logs."""
    calls = [call for log in logs for call in log["collectives"]]
    kinds = collections.Counter(call["kind"].split(" ")[0] for call in calls)
    return StepCosts(
        calls=len(calls),
        bytes=sum(call["bytes"] for call in calls if call["kind"] != "all_to_all"),
        small_all_reduces=max(
            sum(call["kind"] == "all_reduce" and call["bytes"] <= SMALL_BYTES for call in log["collectives"])
            for log in logs
        ),
        kernels=sum(log["LAUNCHES"] for log in logs),
        waits=sum(log[kind] for log in logs for kind in WAITS),
        kinds=dict(sorted(kinds.items())),
    )


def compare_step(both: Programs, case: Case, data: str) -> dict[str, Any]:
    """Six iterations that log nothing; the fourth counts."""
    name = "".join(letter if letter.isalnum() else "_" for letter in case.name)
    given = case.command_flags(data, 6, 100)
    ours = costs(both.ours(case, f"step_{name}_ours", given))
    theirs = costs(both.megatrons(case, f"step_{name}_megatron", given))
    return {
        "name": case.name, "ours": dataclasses.asdict(ours), "megatron_lm": dataclasses.asdict(theirs),
        "no_more": ours.calls <= theirs.calls and ours.bytes <= theirs.bytes,
    }  # fmt: skip


def step_table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Markdown: Triplane / Megatron-LM."""
    yield "| layout | calls | bytes | small all-reduces of a rank | host waits | kernels |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        ours, theirs = row["ours"], row["megatron_lm"]
        cells = [
            f"{ours[key]:,} / {theirs[key]:,}" for key in ("calls", "bytes", "small_all_reduces", "waits", "kernels")
        ]
        yield f"| {row['name']} | {' | '.join(cells)} |"


def twin_table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Markdown."""
    yield "| model | loss of iteration 1 and 20: Triplane | Megatron-LM | largest difference | bound |"
    yield "|---|---|---|---|---|"
    for row in rows:
        ours, theirs = (f"{row[side][0]:.6f}, {row[side][-1]:.6f}" for side in ("ours", "megatron_lm"))
        yield f"| {row['name']} | {ours} | {theirs} | {row['difference']:.1e} | {row['bound']:.0e} |"


def compare_twin(both: Programs, case: Case, data: str) -> dict[str, Any]:
    """Twenty iterations."""
    twin = run_twin(both, case, data)
    return {
        "name": case.name, "difference": twin.difference, "bound": case.bound, "within": twin.difference <= case.bound,
        "ours": twin.ours, "megatron_lm": twin.megatrons,
    }  # fmt: skip


def compare_steps(both: Programs, data: str) -> tuple[list[dict[str, Any]], bool]:
    """Rows, and whether ours asks for no more in any."""
    rows = [compare_step(both, case, data) for case in LAYOUTS]
    print("\n".join(step_table(rows)), flush=True)
    return rows, all(row["no_more"] for row in rows)


def compare_twins(both: Programs, data: str) -> tuple[list[dict[str, Any]], bool]:
    """Rows, and whether all are within their bounds but the last, which must not be."""
    rows = [compare_twin(both, case, data) for case in [*TWINS, CONTROL]]
    print("\n".join(twin_table(rows)), flush=True)
    return rows, [row["within"] for row in rows] == [True] * len(TWINS) + [False]


def main() -> int:
    """The exit code."""
    asked = parse_flags(Comparison, None, "python -m tests.gpu_path.megatron_lm", __doc__)
    parts = {"steps": compare_steps, "twins": compare_twins}
    all_good = True
    with tempfile.TemporaryDirectory() as name, programs(asked.megatron_lm, Path(name)) as both:
        data = write_data(Path(name))
        for part in [asked.only] if asked.only else parts:
            rows, good = parts[part](both, data)
            report = json.loads(REPORT.read_text()) if REPORT.exists() else {}
            report[part] = circumstances() | {"megatron_lm": version(asked.megatron_lm), "rows": rows}
            REPORT.write_text(json.dumps(report, indent=2) + "\n")
            all_good &= good
    return 0 if all_good else 1


def version(checkout: Path) -> str:
    """What the checkout calls itself."""
    package = runpy.run_path(str(checkout / "megatron/core/package_info.py"))
    return str(package["__version__"])


if __name__ == "__main__":
    sys.exit(main())
