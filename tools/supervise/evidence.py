"""What an attempt left in its run's folder: checkpoints, markers, a verdict. No torch here."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.checkpoint import folders
from training.watch import record

VERDICT = f"{record.WATCH}/{record.VERDICT}"
MACHINES = ("CUDA", "cuDNN", "CUBLAS", "ECC", "Input/output error", "Stale file handle")
"""What an exception's last line says when it may be the machine's; running out of its memory is not."""
MARKERS = ("done", "requeue", VERDICT)


@dataclass(kw_only=True, slots=True, frozen=True)
class Verdict:
    """What the run itself says about its end."""

    text: str = ""
    node: str = ""
    """The node that may be at fault, by SLURM's name where it has one; empty where it is not known, or where a program
    raised what no machine makes it raise."""


def newest_iteration(run_dir: Path) -> int | None:
    """Of the checkpoint that the next attempt goes on from; None where there is none, or it cannot be told."""
    try:
        newest = folders.latest(folders.checkpoints(run_dir))
    except OSError:
        return None
    return None if newest is None else folders.iteration_of(newest)


def marker_times(run_dir: Path) -> dict[str, int]:
    """When each marker that is there was written, in ns."""
    found: dict[str, int] = {}
    for name in MARKERS:
        try:
            found[name] = (run_dir / name).stat().st_mtime_ns
        except OSError:
            continue
    return found


def fresh(now: Mapping[str, int], seen: Mapping[str, int]) -> set[str]:
    """The markers that the last attempt wrote: one that died before its first step leaves those of an earlier one."""
    return {name for name, time in now.items() if seen.get(name) != time}


def read_verdict(run_dir: Path) -> Verdict:
    """The verdict that is there; an empty one where it cannot be read."""
    try:
        table = json.loads((run_dir / VERDICT).read_bytes())
    except (OSError, ValueError):
        return Verdict()
    if not isinstance(table, dict):
        return Verdict()
    text = " ".join(_text(table, "line").split())
    machines = any(word in text for word in MACHINES) and "out of memory" not in text
    blamed = table.get("kind") != "exception" or machines
    return Verdict(text=text, node=_text(table, "host") if blamed else "")


def _text(table: Mapping[str, Any], name: str) -> str:
    value = table.get(name)
    return value if isinstance(value, str) else ""
