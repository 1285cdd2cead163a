"""What a Chrome trace of torch.profiler holds, as far as a summary needs it.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU describes the format; categories and
arguments are those of Kineto, torch.profiler's library.
"""

import gzip
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from program.untrusted import InputError, json_value, open_regular, read_bytes

MOST_BYTES = 4 << 30
"""Of a trace that is read, uncompressed: about 15 million events. They take four times as much memory."""
KERNELS = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
OPERATORS = "cpu_op"
ANNOTATIONS = "user_annotation"
HOST_CALLS = frozenset({"cuda_runtime", "cuda_driver"})


@dataclass(slots=True, frozen=True)
class TraceEvent:
    """A span of a thread of the host, or of a stream of the GPU. Times in seconds of the trace's clock."""

    name: str
    category: str
    thread: tuple[Any, Any]
    """Process and thread, or device and stream."""
    begin_s: float
    end_s: float
    args: Mapping[str, Any]


def read_trace(path: Path) -> list[TraceEvent]:
    """The spans of a trace, compressed (``.gz``) or not. Raises InputError, or the system's OSError."""
    content = json_value(_read(path), path)
    events = content.get("traceEvents") if isinstance(content, dict) else None
    if not isinstance(events, list):
        raise InputError(path, 'expected a Chrome trace, an object with a list "traceEvents".')
    return list(_spans(events, path))


def _read(path: Path) -> bytes:
    if path.suffix != ".gz":
        return read_bytes(path, MOST_BYTES)
    try:
        with open_regular(path) as file, gzip.open(file) as inner:
            data = inner.read(MOST_BYTES + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(path, f"expected gzip's format: {error}.") from None
    if len(data) > MOST_BYTES:
        raise InputError(path, f"expected at most {MOST_BYTES:,} bytes, uncompressed, found more.")
    return data


def _spans(events: list[Any], path: Path) -> Iterator[TraceEvent]:
    for number, event in enumerate(events):
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        name, begin, duration = event.get("name"), event.get("ts"), event.get("dur")
        if not (isinstance(name, str) and isinstance(begin, int | float) and isinstance(duration, int | float)):
            raise InputError(path, f"event {number}: expected a name, ts and dur.")
        args = event.get("args")
        yield TraceEvent(
            name=name,
            category=str(event.get("cat", "")),
            thread=(event.get("pid"), event.get("tid")),
            begin_s=begin / 1e6,
            end_s=(begin + duration) / 1e6,
            args=args if isinstance(args, dict) else {},
        )
