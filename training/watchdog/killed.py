"""What to say of a CPU rank that SIGKILL has ended: mostly the kernel's doing, for want of the host's memory."""

import signal
from dataclasses import dataclass, replace
from typing import Self

from models.costs.predict import size
from parallel.failures import Failure
from program import host_memory
from training.watchdog.process import host_memory_kills, memory_kills
from training.watchdog.verdict import Verdict


@dataclass(kw_only=True, slots=True, frozen=True)
class HostMemory:
    """As it was before the ranks started."""

    available: float
    """Bytes."""
    total: float
    """Bytes."""
    kills: tuple[int, int]
    """By the kernel for want of memory: in this control group, and on the whole host."""

    @classmethod
    def now(cls) -> Self:
        return cls(
            available=host_memory.available_bytes(),
            total=host_memory.total_bytes(),
            kills=(memory_kills(), host_memory_kills()),
        )


def explained(failure: Failure, verdict: Verdict | None, before: HostMemory, ranks: int, predicted: float) -> Failure:
    """The failure with that, where a rank's end was a SIGKILL that did not come from its watchdog.

    verdict: the watchdogs'. predicted: bytes of all ranks together, at the peak of a step; 0: not known.
    """
    if failure.code != 128 + signal.SIGKILL or (verdict is not None and verdict.kind == "hang"):
        return failure
    return replace(failure, text=f"{failure.text.rstrip()}\n{said(before, HostMemory.now(), ranks, predicted)}\n")


def said(before: HostMemory, after: HostMemory, ranks: int, predicted: float) -> str:
    """The cause, and what is known of it."""
    own, host = (late - early for late, early in zip(after.kills, before.kills, strict=True))
    known = ""
    if own or host:
        where = "this job (memory.events)" if own else "this host (/proc/vmstat)"
        known = f", and the kernel has counted {own or host} in {where} since the start"
    hold = f"; {ranks} ranks are predicted to hold {size(predicted)} at the peak of a step" if predicted else ""
    return (
        f"Mostly such a signal is the kernel's OOM killer's, where memory runs out{known}. Before the start "
        f"{size(before.available)} of {size(before.total)} were available{hold}, and processes, libraries and saves "
        "come on top. Where it was that: a smaller model, micro batch or sequence, or a machine with more memory."
    )
