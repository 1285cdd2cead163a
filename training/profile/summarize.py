"""python -m training.profile.summarize TRACE DEVICE: what there is to do once a rank has written its trace.

A process of its own, of low priority, while training goes on: reading a trace in Python takes a second for 100,000
events, and would hold up the thread that launches kernels. Writes the summary, compresses the trace, and removes what
is beyond the limit.
"""

import dataclasses
import gzip
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from training.profile.chrome_trace import read_trace
from training.profile.files import drop_old_traces, rank_of, write_part
from training.profile.summary import summarize


def main(arguments: Sequence[str]) -> int:
    """The exit code. Raises for a trace that cannot be read, or a disk that is full."""
    trace, device = Path(arguments[0]), arguments[1]
    rank = rank_of(trace)
    assert rank is not None, trace
    summary = summarize(read_trace(trace), rank, "cuda" if device == "cuda" else "cpu")
    kept = compress(trace)
    removed = drop_old_traces(trace.parents[2], rank)
    write_part(trace.parent, dataclasses.replace(summary, trace="" if kept in removed else kept.name))
    return 0


def compress(trace: Path) -> Path:
    """The trace in gzip's format, which Perfetto reads as well: a twentieth of the bytes."""
    target, partial = trace.with_suffix(".json.gz"), trace.with_suffix(".json.gz.unfinished")
    with trace.open("rb") as source, gzip.open(partial, "wb", compresslevel=6) as file:
        shutil.copyfileobj(source, file, 1 << 20)
    partial.replace(target)
    trace.unlink()
    return target


if __name__ == "__main__":
    os.nice(19)
    sys.exit(main(sys.argv[1:]))
