"""What a node's kernel knows: memory of processes and of the host, and what its network ports have carried."""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

import psutil

from program import host_memory
from program.untrusted import read_text

INFINIBAND, INTERFACES = Path("/sys/class/infiniband"), Path("/sys/class/net")
IB_ERRORS = ("symbol_error", "link_downed", "port_rcv_errors", "port_xmit_discards", "local_link_integrity_errors")
"""Counters of a port (Documentation/ABI/stable/sysfs-class-infiniband in Linux)."""
IB_WORD = 4
"""Bytes that a port counts as one."""


def memory() -> dict[str, float]:
    """Resident memory of this process, and what the host can still give, GiB."""
    resident = psutil.Process().memory_info().rss
    return {"host_memory_gib": resident / 2**30, "host_memory_available_gib": host_memory.available_bytes() / 2**30}


class Network:
    """Traffic and errors of a node since the last reading: of its InfiniBand ports, or, where it has none, of its
    interfaces but loopback (with RoCE, ports and interfaces are the same). A few small files are read each time.
    """

    NAMES = ("network_sent_gib", "network_received_gib", "network_errors")

    def __init__(self, infiniband: Path = INFINIBAND, interfaces: Path = INTERFACES) -> None:
        self.infiniband, self.interfaces = infiniband, interfaces
        self.before = self._totals()

    def read(self) -> dict[str, float]:
        """NaN where the kernel shows neither. A counter that was reset counts from 0."""
        now, before = self._totals(), self.before
        self.before = now
        if not now:
            return dict.fromkeys(self.NAMES, math.nan)
        grown = [sum(max(0, one[kind] - before.get(port, one)[kind]) for port, one in now.items()) for kind in range(3)]
        return dict(zip(self.NAMES, (grown[0] / 2**30, grown[1] / 2**30, float(grown[2])), strict=True))

    def _totals(self) -> dict[str, tuple[int, int, int]]:
        """Port -> bytes sent, bytes received, errors."""
        return dict(self._ports()) or dict(self._interfaces())

    def _ports(self) -> Iterator[tuple[str, tuple[int, int, int]]]:
        for folder in self.infiniband.glob("*/ports/*/counters"):
            sent, received = (IB_WORD * _count(folder / name) for name in ("port_xmit_data", "port_rcv_data"))
            yield str(folder), (sent, received, sum(_count(folder / name) for name in IB_ERRORS))

    def _interfaces(self) -> Iterator[tuple[str, tuple[int, int, int]]]:
        for folder in self.interfaces.glob("*/statistics"):
            if folder.parent.name != "lo":
                errors = _count(folder / "tx_errors") + _count(folder / "rx_errors")
                yield str(folder), (_count(folder / "tx_bytes"), _count(folder / "rx_bytes"), errors)


def _count(path: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(read_text(path))
    return 0
