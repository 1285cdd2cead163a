"""Memory that grows steadily on a rank: what would end the run in a week is said within its first hours."""

import os
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from parallel.groups import Ranks
from program.untrusted import read_text
from training.checkpoint.agreement import gathered_rows
from training.health.names import host_of
from training.loop import Callback
from training.progress import Progress
from training.run_dir.history import Note, unnoted
from training.step import StepResult

GROWTH_MIB = 256.0
"""A rise must have come to so many: allocators and caches of libraries settle within tens of MiB, and a leak that
matters passes this long before a node is full."""
LOOKS = 10
"""A rise must have gone on over so many looks."""
KEPT = 40
"""Looks in the window; older ones are forgotten."""
STEADY = 0.9
"""Least share of the variation that a straight line explains (r squared): steps and saw-teeth explain less."""
MEBIBYTE = 2**20


@dataclass(slots=True)
class Series:
    """What one kind of memory came to at the last looks."""

    iterations: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    mib: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))

    def add(self, iteration: int, mib: float) -> None:
        """One more look."""
        self.iterations.append(iteration)
        self.mib.append(mib)

    def slope(self, least_mib: float) -> float:
        """MiB per iteration of a steady rise by ``least_mib`` or more; 0.0 where there is none."""
        if len(self.mib) < LOOKS:
            return 0.0
        slope, explained = line(list(self.iterations), list(self.mib))
        risen = slope * (self.iterations[-1] - self.iterations[0])
        return slope if risen >= least_mib and explained >= STEADY and _still_rises(list(self.mib)) else 0.0


class MemoryGrowth(Callback):
    """Reads each rank's own memory and its GPU's every ``interval`` iterations; a rise is said once per rank.

    A leak is in all ranks as a rule: a look names one of them, and counts the others.
    """

    def __init__(self, interval: int, ranks: Ranks, note: Note = unnoted) -> None:
        self.interval, self.ranks, self.note = interval, ranks, note
        self.host, self.gpu = Series(), Series()
        self.named: set[tuple[int, str]] = set()
        self.looks = 0

    def after_step(self, progress: Progress, result: StepResult) -> None:
        if progress.iteration % self.interval:
            return
        self.looks += 1
        if self.looks == 1:  # caches fill and allocators settle in the first iterations
            return
        self.host.add(progress.iteration, host_mib())
        if self.ranks.device.type == "cuda":
            self.gpu.add(progress.iteration, torch.cuda.memory_allocated(self.ranks.device) / MEBIBYTE)
        own = [self.host.slope(GROWTH_MIB), host_room_mib(), self.gpu.slope(GROWTH_MIB), self._gpu_room_mib()]
        table = gathered_rows(own, self.ranks)
        for kind, column in (("memory", 0), ("GPU memory", 2)):
            rises = {rank: row[column] for rank, row in enumerate(table) if row[column] > 0}
            if new := {rank: slope for rank, slope in rises.items() if (rank, kind) not in self.named}:
                steepest = max(new, key=lambda rank: new[rank])
                self._tell(kind, steepest, new, table[steepest][column + 1], progress)
                return  # the other kind comes with the next look

    def _tell(self, kind: str, rank: int, slopes: Mapping[int, float], room_mib: float, progress: Progress) -> None:
        """Of all new ranks the steepest one by name. Collective: it alone knows its host."""
        self.named |= {(each, kind) for each in slopes}
        slope, others = slopes[rank], len(slopes) - 1
        more = f" and of {others} other{'s' if others > 1 else ''}, slower," if others else ""
        text = (
            f"{kind} of rank {rank} ({host_of(rank, self.ranks)}){more} grows steadily, by {1000 * slope:,.0f} MiB per "
            f"1,000 iterations: the {room_mib:,.0f} MiB that are left there last about {room_mib / slope:,.0f} more"
        )
        self.ranks.say(text)
        self.note("memory_growth", progress.iteration, rank=rank, text=text)

    def _gpu_room_mib(self) -> float:
        return torch.cuda.mem_get_info(self.ranks.device)[0] / MEBIBYTE if self.ranks.device.type == "cuda" else 0.0


def line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Slope of the least-squares line through the points, and the share of y's variation that it explains."""
    explained = statistics.correlation(x, y) ** 2 if min(y) < max(y) else 0.0
    return statistics.linear_regression(x, y).slope, explained


def _still_rises(mib: Sequence[float]) -> bool:
    """The later half by a third of all or more: a rise that has come to rest is none."""
    middle = mib[len(mib) // 2]
    return mib[-1] - middle > (mib[-1] - mib[0]) / 3


def host_mib() -> float:
    """Memory of this process alone: pages of token files and what is shared with other ranks do not count (Linux)."""
    resident, shared = read_text(Path("/proc/self/statm")).split()[1:3]
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE") / MEBIBYTE


def host_room_mib() -> float:
    """What this node can still give."""
    return psutil.virtual_memory().available / MEBIBYTE
