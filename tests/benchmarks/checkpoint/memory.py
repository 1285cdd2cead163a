"""How much memory a process took meanwhile, beyond what it had: from the kernel's own high-water mark."""

import ctypes
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from program.untrusted import read_text

_RESET_PEAK = "5"  # proc(5), clear_refs: set the peak resident set to the current one


class MemoryCost(NamedTuple):
    """What an action took."""

    seconds: float
    grown_bytes: int
    """Largest growth of this process' resident memory during it."""


def cost(action: Callable[[], object], ready: Callable[[], object]) -> MemoryCost:
    """Time and memory of ``action``, which starts when ``ready``, say a barrier, returns.

    What was freed before is given back to the system first, or growth would fill it unseen.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    before = resident("VmRSS")
    ready()
    began = time.perf_counter()
    action()
    seconds = time.perf_counter() - began
    return MemoryCost(seconds, max(0, resident("VmHWM") - before))


def resident(name: str, process: str = "self") -> int:
    """A line of /proc/PROCESS/status, in bytes: VmRSS, VmHWM, RssAnon, ..."""
    lines = read_text(Path(f"/proc/{process}/status")).splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
