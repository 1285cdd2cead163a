"""What an attempt left in its run's folder: checkpoints, markers, a verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from program.schema import JSON
from program.untrusted import if_readable, read_json
from training.checkpoint import folders
from training.watchdog import verdict_file

VERDICT = "verdict"
"""The newest start's; what else is among the markers is a file's name."""
MACHINES = ("CUDA", "cuDNN", "CUBLAS", "ECC", "Input/output error", "Stale file handle")
"""What an exception's last line says when it may be the machine's."""
MEMORY = "out of memory", "out-of-memory"
"""What a verdict says of a rank that ran out of memory, the GPU's or the node's: no machine is to blame for that."""
SURROUNDINGS = ("OSError", "[Errno", "Connection", "Dist", "NCCL", "Timeout", "timed out")
"""What an exception's last line says when it is about files and networks, which may answer the next time."""
TRAINING = ("step", "evaluation", "generation", "save")
"""The phases in which program and data have all they need: what they end there they end again."""
MARKERS = ("done", "requeue")


@dataclass(kw_only=True, slots=True, frozen=True)
class EndEvidence:
    """What the run itself says about its end."""

    text: str = ""
    node: str = ""
    """The node that may be at fault, by SLURM's name where it has one; empty where it is not known, or where a program
    raised what no machine makes it raise."""
    cause: str = ""
    """What ends every attempt alike, with its iteration; empty where machine, network or files may have had a part."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Left:
    """What lies in a run's folder."""

    markers: dict[str, int]
    """When each was written, in ns; so with the newest verdict."""
    iteration: int | None
    """Of the newest checkpoint."""


def left(run_dir: Path) -> Left:
    """Now."""
    return Left(markers=marker_times(run_dir), iteration=newest_iteration(run_dir))


def newest_iteration(run_dir: Path) -> int | None:
    """Of the checkpoint that the next attempt goes on from; None where there is none, or it is unknown."""
    try:
        newest = folders.latest(folders.checkpoints(run_dir))
    except OSError:
        return None
    return None if newest is None else folders.iteration_of(newest)


def marker_times(run_dir: Path) -> dict[str, int]:
    """When each marker that is there was written, in ns; so with the newest verdict."""
    paths = {name: run_dir / name for name in MARKERS} | {VERDICT: verdict_file.newest(run_dir)}
    found: dict[str, int] = {}
    for name, path in paths.items():
        try:
            if path is not None:
                found[name] = path.stat().st_mtime_ns
        except OSError:
            continue
    return found


def fresh(now: Mapping[str, int], seen: Mapping[str, int]) -> set[str]:
    """The markers that the last attempt wrote: one that died before its first step leaves those of an earlier one."""
    return {name for name, time in now.items() if seen.get(name) != time}


def read_verdict(run_dir: Path) -> EndEvidence:
    """The newest verdict that is there; an empty one where it cannot be read."""
    path = verdict_file.newest(run_dir)
    table: dict[str, Any] = (path and if_readable(read_json, path, dict[str, JSON])) or {}
    text, kind = " ".join(_text(table, "line").split()), _text(table, "kind")
    host = _text(table, "host") if _blames(kind, text) else ""
    own = kind == "fault" or (kind == "exception" and not _any((*SURROUNDINGS, *MEMORY), text))
    own = own and not host and _text(table, "phase") in TRAINING
    cause = f"iteration {table.get('iteration')}: {text}" if own else ""
    return EndEvidence(text=text, node=host, cause=cause)


def _blames(kind: str, text: str) -> bool:
    """Whether the verdict's host may be at fault. An echo's has only lost its peer; a fault names a host, or none.

    A rank that was killed may have asked for too much memory, on any host.
    """
    if _any(MEMORY, text):
        return False
    return kind in ("hang", "lost", "killed", "fault") or (kind == "exception" and _any(MACHINES, text))


def _any(words: Sequence[str], text: str) -> bool:
    return any(word in text for word in words)


def _text(table: Mapping[str, Any], name: str) -> str:
    value = table.get(name)
    return value if isinstance(value, str) else ""
