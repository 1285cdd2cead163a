"""What RUN_DIR/profile holds, and which of it is kept.

| in RUN_DIR/profile | what |
|---|---|
| ``timeline.jsonl`` | a measured timeline a line (timeline.py) |
| ``iter_0000012/`` | of the trace that ended with iteration 12: |
| ``rank_00000.json.gz`` | the trace, for Perfetto or chrome://tracing; ``.json`` until its summary is written |
| ``rank_00000.summary.json`` | of this rank (RankSummary) |
| ``rank_00000_memory.pickle`` | a snapshot of the GPU's memory |
| ``summary.json`` | of all ranks that have one (TraceSummary) |
| ``out_of_memory/rank_00000_memory.pickle`` | a snapshot of the moment when memory ran out |
"""

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from program.durable import replace_file
from program.schema import with_leaves
from program.untrusted import read_json
from training.profile.summary import RankSummary

FOLDER = "profile"
SUMMARY = "summary.json"
_TRACE = re.compile(r"rank_(\d{5,})\.json(\.gz)?")
_PART = re.compile(r"rank_(\d{5,})\.summary\.json")


@dataclass(kw_only=True, slots=True, frozen=True)
class TraceSummary:
    """The file summary.json: of a trace, all ranks that were traced."""

    version: int
    """Of this format: 1."""
    ranks: tuple[RankSummary, ...]


def timeline_path(run_dir: Path) -> Path:
    """Of the measured timelines."""
    return run_dir / FOLDER / "timeline.jsonl"


def trace_folder(run_dir: Path, last_iteration: int) -> Path:
    """Of the trace that ended with an iteration."""
    return run_dir / FOLDER / f"iter_{last_iteration:07d}"


def trace_name(rank: int) -> str:
    """Of a trace as the profiler writes it."""
    return f"rank_{rank:05d}.json"


def rank_of(trace: Path) -> int | None:
    """Whose trace a file is; None where its name says nothing."""
    found = _TRACE.fullmatch(trace.name)
    return int(found[1]) if found else None


def part_path(folder: Path, rank: int) -> Path:
    """Of one rank's own summary."""
    return folder / f"rank_{rank:05d}.summary.json"


def write_part(folder: Path, summary: RankSummary) -> None:
    """One rank's own file, and ``summary.json`` of all that are there: the last one to be written has every rank."""
    in_us = with_leaves(dataclasses.asdict(summary), lambda one: round(one, 6) if isinstance(one, float) else one)
    text = json.dumps(in_us)
    replace_file(part_path(folder, summary.rank), text.encode(), suffix=".unfinished", durable=False)
    merged = list[Path]()
    while merged != (parts := _parts(folder)):  # another rank may have written its own meanwhile
        merged = parts
        every = TraceSummary(version=1, ranks=tuple(read_json(path, RankSummary) for path in parts))
        text = json.dumps(dataclasses.asdict(every), indent=1)
        replace_file(folder / SUMMARY, text.encode(), suffix=f".unfinished-{summary.rank}", durable=False)


def _parts(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if _PART.fullmatch(path.name))


KEPT_BYTES = 1 << 30
"""Of compressed traces that each rank keeps, the newest ones."""


def drop_old_traces(run_dir: Path, rank: int, limit_bytes: int = KEPT_BYTES) -> Sequence[Path]:
    """Remove this rank's oldest traces until the rest is within the limit: what was removed."""
    name = trace_name(rank) + ".gz"
    traces = sorted((run_dir / FOLDER).glob(f"iter_*/{name}"), reverse=True)
    removed, total = [], 0
    for trace in traces:
        total += trace.stat().st_size
        if total > limit_bytes:
            trace.unlink(missing_ok=True)
            removed.append(trace)
    return removed
