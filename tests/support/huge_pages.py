"""Forks of a process that has imported torch, Megatron and transformers, in a quarter of the time.

Each fork copies the page table of 0.5 GB in pages of 4 KiB, and its end takes it down: 57 ms, and a tenth of the
suite's CPU time (perf, 2 cores, 2026-11-24). In huge pages it is 12 ms.
"""

import ctypes
import os
import re
from pathlib import Path

HUGE = 2 << 20
MADV_COLLAPSE = 25
"""Linux 6.1, madvise(2): makes huge pages of what lies there, whatever the system's setting for new memory is."""
FORKS = 64
"""What a fork's parent writes to while the child lives is split into small pages again: collapsed every so often."""


def collapse() -> None:
    """This process's memory that no file backs. Where the kernel cannot, all stays as it is."""
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        if found := re.match(r"(\w+)-(\w+) rw-p 0+ 00:00 0", line):
            start, end = (int(address, 16) for address in found.groups())
            start, end = -(-start // HUGE) * HUGE, end // HUGE * HUGE
            if start < end:
                madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_COLLAPSE)


def keep_collapsed() -> None:
    """From now on in this process, not in those that it forks."""
    own, forks = os.getpid(), 0

    def before() -> None:
        nonlocal forks
        if os.getpid() == own:
            if forks % FORKS == 0:
                collapse()
            forks += 1

    os.register_at_fork(before=before)
