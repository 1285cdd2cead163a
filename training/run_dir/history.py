"""RUN_DIR/history.jsonl: what happened to a run, over all its starts, one JSON object per event as it happens.

    start, end              by the process that owns the run's folder: a launch, and its exit code with the verdict
    death                   of a start that left no end, by the next start: its verdict, and when it was last alive
    begin, first_step       training begins at an iteration, in a layout; its first step is done
    save, commit            training stood still for a checkpoint; the checkpoint is complete
    uploaded                it is in checkpoint.bucket, too
    evaluation              and how many seconds it took
    stage                   one begins: its number and name, in words ([[stage]])
    branched                from which checkpoint of another run, in words (train.decay_from)
    samples_skipped         which samples of the order, in words (data.samples_to_skip)
    stop                    the loop has ended: done, stage, exit_interval or requested
    compiled                the first step's compilation, in words (train.compile)
    spike, nonfinite, replayed, skipped, straggler, slow, memory_growth, recompiled, save_failed, upload_failed, ...
                            what was found wrong, in words: "text"

Each has ``time_s`` (Unix seconds), ``event``, ``iteration`` where it belongs to one, ``attempt`` (the start's name),
and what else belongs to it. Readers skip what they do not know.
"""

import contextlib
import json
import math
import os
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from program.schema import JSON, with_leaves
from program.untrusted import InputError, if_readable, parse_json, read_bytes, regular_descriptor

HISTORY = "history.jsonl"
MOST_BYTES = 256 << 20


class Note(Protocol):
    """``note`` for one start of a run; on all ranks but rank 0, ``unnoted``."""

    def __call__(self, event: str, iteration: int | None = None, **fields: Any) -> None: ...


def unnoted(event: str, iteration: int | None = None, **fields: Any) -> None:
    """Keeps nothing."""


def noted_by(run_dir: Path, rank: int, attempt: str) -> Note:
    """How this rank keeps events: rank 0 does, for all."""
    return partial(note, run_dir, attempt=attempt) if rank == 0 else unnoted


def note(run_dir: Path, event: str, iteration: int | None = None, **fields: Any) -> None:
    """Append an event, in one write. A disk that does not take it loses it: training goes on, and other files say so.

    What a kill left of the last line is ended first, so that it spoils no other. No line has the folder's own path:
    RUN_DIR stands for it.
    """
    at = {} if iteration is None else {"iteration": iteration}
    record = {"time_s": round(time.time(), 3), "event": event, **at, **fields}
    line = json.dumps(with_leaves(record, partial(_plain, str(run_dir.absolute()))), allow_nan=False).encode() + b"\n"
    with contextlib.suppress(OSError, InputError):
        file = regular_descriptor(run_dir / HISTORY, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        try:
            size = os.fstat(file).st_size
            torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
            os.write(file, b"\n" + line if torn else line)
        finally:
            os.close(file)


@dataclass(kw_only=True, slots=True, frozen=True)
class Event:
    """A line of HISTORY."""

    time_s: float
    event: str
    iteration: int | None = None
    fields: dict[str, JSON] = field(default_factory=dict)
    """What else is in the line."""

    def number(self, name: str) -> float:
        """A field that should be a number; 0.0 where it is not."""
        value = self.fields.get(name)
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0

    def text(self, name: str) -> str:
        """A field that should be text; empty where it is not."""
        value = self.fields.get(name)
        return value if isinstance(value, str) else ""


def read_history(run_dir: Path) -> list[Event]:
    """The events in their order; lines that are none, as a kill or a full disk leaves them, are skipped.

    Empty where there is no file, or it cannot be read.
    """
    lines = (if_readable(read_bytes, run_dir / HISTORY, MOST_BYTES) or b"").splitlines()
    return [event for line in lines if (event := _event(line)) is not None]


def _event(line: bytes) -> Event | None:
    try:
        record = parse_json(line, dict[str, JSON])
    except InputError:
        return None
    when, name, iteration = (record.pop(key, None) for key in ("time_s", "event", "iteration"))
    if not isinstance(when, int | float) or not isinstance(name, str) or abs(when) > 1e11:
        return None
    whole = iteration if isinstance(iteration, int) and iteration >= 0 else None
    return Event(time_s=float(when), event=name, iteration=whole, fields=record)


def _plain(own_path: str, value: Any) -> Any:
    """JSON cannot spell NaN and Inf: they become text, as in metrics.jsonl."""
    if isinstance(value, str):
        return value.replace(own_path, "RUN_DIR")
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
