"""A hook: what one step asks of the device, and what a run leaves behind.

``rank-RANK.txt`` in the folder EMULATED_CUDA_RECORD gets, of the third iteration: kernels launched, where the host
waits (torch's sync debug mode: how often, the line that waits, Triplane's innermost line that led there), collectives
in the order of their calls. Of later iterations: memory that was asked for. Of the run's end: what is still registered,
and devices that any of its threads has used.
"""

import collections
import ctypes
import os
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.gpu_path import flight
from tests.gpu_path.counters import Count, counts
from tests.gpu_path.emulator import ROOT
from training import train

ITERATION = 3
SMALL_BYTES = 4096
NOT_COUNTED = (Count.COLLECTIVES, Count.REGISTERED)


class StepRecord:
    """Of one rank."""

    def __init__(self) -> None:
        self.iteration = 0
        self.lines: list[str] = []
        self.allocations: tuple[int, int] | None = None
        self.started = counts()[Count.REGISTERED]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """One iteration."""
        self.iteration += 1
        if self.iteration != ITERATION:
            yield
        else:
            newest, before = flight.last(), counts()
            with host_waits() as waits:
                yield
            after = counts()
            self.lines += [f"{after[kind] - before[kind]} {kind.name}" for kind in Count if kind not in NOT_COUNTED]
            self.lines += [f"{number} waits: {where}" for where, number in sorted(waits.items())]
            calls = flight.since(newest)
            small = sum(call.kind == "all_reduce" and call.bytes <= SMALL_BYTES for call in calls)
            self.lines.append(f"{small} all-reduces of at most {SMALL_BYTES:,} bytes")
            self.lines += folded([str(call) for call in calls])
        if self.iteration == ITERATION:
            self.allocations = allocations()
        elif self.allocations and allocations() != self.allocations:
            self.lines.append(f"iteration {self.iteration} allocates: {self.allocations} before, {allocations()} after")
            self.allocations = allocations()

    def finish(self) -> None:
        """After the run."""
        self.lines.append(f"{counts()[Count.REGISTERED] - self.started} ranges of host memory are still registered")
        others = [index for index in used_devices() if index != torch.cuda.current_device()]
        self.lines.append(f"devices of other ranks in use: {others or 'none'}")
        folder = Path(os.environ["EMULATED_CUDA_RECORD"])
        (folder / f"rank-{os.environ['RANK']}.txt").write_text("\n".join(self.lines) + "\n")


def allocations() -> tuple[int, int]:
    """How often memory of the device and pinned memory were taken from the driver."""
    device, host = torch.cuda.memory_stats(), torch.cuda.host_memory_stats()
    return device["num_device_alloc"], host["num_host_alloc"]


def used_devices() -> list[int]:
    """Those that a thread of this process has a context on."""
    contexts = (ctypes.c_int * torch.cuda.device_count()).in_dll(ctypes.CDLL(None), "emulated_cuda_active")
    return [index for index, used in enumerate(contexts) if used]


@contextmanager
def host_waits() -> Iterator[collections.Counter[str]]:
    """Places and how often, complete at the end."""
    found: collections.Counter[str] = collections.Counter()

    def count(message: Warning | str, *_: object, **__: object) -> None:
        if "called a synchronizing" in str(message):
            found[place(traceback.extract_stack())] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = count
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")


def place(stack: Sequence[traceback.FrameSummary]) -> str:
    """The line that waits, and ours. By function, not by line: a line moves with every edit above it."""
    own = (__file__, warnings.__file__)
    outside = [frame for frame in stack if "/torch/" not in frame.filename and frame.filename not in own]
    ours = [
        frame for frame in outside if frame.filename.startswith(str(ROOT)) and "site-packages" not in frame.filename
    ]
    waiting, led = (f"{flight.short(frame.filename)}:{frame.name}" for frame in (outside[-1], ours[-1]))
    return waiting if waiting == led else f"{waiting} from {led}"


def folded(lines: Sequence[str]) -> list[str]:
    """Repeated runs of lines once, as ``N x``, with their own repetitions folded."""
    done: list[str] = []
    at = 0
    while at < len(lines):
        length, times = longest_repetition(lines, at)
        inner = folded(lines[at : at + length]) if length > 1 else [lines[at]]
        if times == 1:
            done += inner
        elif len(inner) == 1:
            done.append(f"{times} x {inner[0]}")
        else:
            done += [f"{times} x", *("    " + line for line in inner)]
        at += length * times
    return done


def longest_repetition(lines: Sequence[str], at: int) -> tuple[int, int]:
    """(length, times) of the run at ``at`` that repeats over the most lines; the shortest of those."""
    best = (1, 1)
    for length in range(1, (len(lines) - at) // 2 + 1):
        run, times = lines[at : at + length], 1
        while lines[at + length * times : at + length * (times + 1)] == run:
            times += 1
        if times > 1 and length * times > best[0] * best[1]:
            best = (length, times)
    return best


record = StepRecord()
one_step, run = train.one_step, train.train


def recorded_step(*args: Any, **kwargs: Any) -> Any:
    """In place of training.train's."""
    with record.recording():
        return one_step(*args, **kwargs)


def recorded_run(*args: Any, **kwargs: Any) -> int:
    """In place of training.train's."""
    code = run(*args, **kwargs)
    record.finish()
    return code


train.one_step, train.train = recorded_step, recorded_run
