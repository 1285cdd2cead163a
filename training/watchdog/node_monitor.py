"""The ranks of one node as its watchdogs see them: who stands still since when.

Seconds are counted while the watchdog itself looks, so a node that was suspended as a whole, or a laptop that slept,
is not taken for hung.
"""

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from program.number_ranges import listed, merged
from training.watchdog.heartbeat import STACKS_SIGNAL, SUFFIX, HeartbeatReading, Page, remove
from training.watchdog.pace import LOOK_S
from training.watchdog.process import lives, moved_bytes, send, send_to_main_thread, status
from training.watchdog.stacks import StackPosition, stand

_BUSY = 0.2
"""Of a core: a rank that tokenises or packs has no beats, but it computes."""
_MOVING_BYTES_PER_S = 1e5
"""A rank that reads or writes its data or a checkpoint has none either, but it moves bytes."""
_WORKS = {"data": (True, True), "load": (False, True), "save": (False, True)}
"""Phases in which computing, or moving bytes, is progress."""
_TICKS_PER_S = 100  # USER_HZ, the same on every Linux
_STACKS_S = 3.0
"""Processes that have not written their stacks within that are in the kernel (state D) or have lost their memory."""
STOPPED = "stopped: its stacks are taken when it is ended"
STILL_ASKED_S = 10.0
"""A watchdog that has not looked for so long is not the node's first any more."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Report:
    """One rank, as its node tells the others."""

    rank: int
    iteration: int
    phase: str
    beats: int
    state: str
    """Of its process, see ``process.Status``; ``X`` where it is gone."""
    still_s: float
    overdue: bool
    """It has stood still for longer than it may."""
    stand: StackPosition | None = None


class Peer:
    """One rank of this node, looked at again and again."""

    def __init__(self, page: Page) -> None:
        self.page, self.about = page, page.about
        self.reading: HeartbeatReading = page.read()
        self.state, self.still_s = "R", 0.0
        self._signed, self._unsigned_s = page.watchdog(), 0.0
        self._ticks, self._bytes = 0, 0
        self._stand: StackPosition | None = None

    def poll(self, passed_s: float) -> None:
        """``passed_s`` after the last look."""
        reading, signed, found = (
            self.page.read(),
            self.page.watchdog(),
            status(self.about.pid, self.about.process_start),
        )
        self._unsigned_s = self._unsigned_s + passed_s if signed == self._signed else 0.0
        self._signed = signed
        self.state = found.state if found else "X"
        ticks, moved = (found.cpu_ticks if found else 0), 0
        computes, moves = _WORKS.get(reading.phase, (False, False))
        if moves:
            moved = moved_bytes(self.about.pid)
        works = computes and ticks - self._ticks > _BUSY * _TICKS_PER_S * passed_s
        works |= moves and moved - self._bytes > _MOVING_BYTES_PER_S * passed_s
        in_debugger = self.state == "t"
        moving = reading.beats != self.reading.beats or works or in_debugger
        self.still_s = 0.0 if moving else self.still_s + passed_s
        self.reading, self._ticks, self._bytes = reading, ticks, moved

    @property
    def timeout_s(self) -> float:
        return self.about.step_timeout_s if self.reading.stepped else self.about.start_timeout_s

    @property
    def is_gone(self) -> bool:
        return self.state in ("X", "Z")

    @property
    def overdue(self) -> bool:
        return not self.is_gone and self.still_s > self.timeout_s

    def watchdog_works(self) -> bool:
        """Whether this rank's own watchdog lives and looks."""
        pid, start, looks, done = self._signed
        return looks > 0 and not done and self._unsigned_s < STILL_ASKED_S and lives(pid, start or None)

    def report(self) -> Report:
        at = self.reading
        return Report(
            rank=self.about.rank, iteration=at.iteration, phase=at.phase, beats=at.beats, state=self.state,
            still_s=round(self.still_s, 1), overdue=self.overdue, stand=self._stand,
        )  # fmt: skip

    def stacks_file(self) -> Path:
        return self.page.path.with_suffix(".stacks")

    def send(self, number: int) -> None:
        send(self.about.pid, self.about.process_start, number)

    def take_stand(self, text: str) -> None:
        """Note where its main thread stands, by the stacks that it wrote."""
        cuda = "/torch/cuda/" in text or self.page.path.with_suffix(".pipe").exists()
        self._stand = stand(text, self.about.main_thread, cuda)


class NodeMonitor:
    """All ranks of this node whose pages begin like ``path``'s, that of ``own``."""

    def __init__(self, own: Page, now_s: float) -> None:
        """now_s: of a clock that need not stand still while the node is suspended."""
        self.prefix = own.path.name[: own.path.name.rindex("-") + 1]
        self.folder, self.own = own.path.parent, own.about.rank
        self.peers: dict[int, Peer] = {own.about.rank: Peer(own)}
        self._looked_s = now_s

    def poll(self, now_s: float) -> None:
        """Check every rank; new ones are found as they come."""
        passed_s = min(now_s - self._looked_s, 4 * LOOK_S)
        self._looked_s = now_s
        for path in self.folder.glob(f"{self.prefix}*{SUFFIX}"):
            with contextlib.suppress(OSError, ValueError, TypeError):
                rank = int(path.stem[len(self.prefix) :])
                known = self.peers.get(rank)
                if known is None or known.page.inode != path.stat().st_ino:
                    self.peers[rank] = Peer(Page(path))
        for peer in self.peers.values():
            peer.poll(passed_s)

    @property
    def leads(self) -> bool:
        """Whether the watchdog of rank ``own`` is the first that works on this node."""
        return not any(self.peers[rank].watchdog_works() for rank in self.peers if rank < self.own)

    @property
    def stands_still(self) -> bool:
        """Whether no rank here makes progress, and at least one should."""
        left = [peer for peer in self.peers.values() if not peer.is_gone]
        return bool(left) and all(peer.overdue for peer in left)

    def reports(self) -> list[Report]:
        return [peer.report() for _, peer in sorted(self.peers.items())]

    def send(self, number: int) -> None:
        """A signal to every rank of this node."""
        for peer in self.peers.values():
            peer.send(number)

    def take_stacks(self) -> str:
        """Make every rank write its stacks: their text. One that is stopped would go on for it, so it is left alone."""
        left = {rank: peer for rank, peer in sorted(self.peers.items()) if not peer.is_gone}
        texts = _stacks_of([peer for peer in left.values() if peer.state != "T"])
        for rank, text in texts.items():
            left[rank].take_stand(text)
        return "\n".join(_headed(peer, texts.get(rank, STOPPED)) for rank, peer in left.items())

    def take_stopped_stacks(self) -> str:
        """The stacks of ranks that are stopped: they run for that moment, so it is the last thing that is asked."""
        stopped = [peer for peer in self.peers.values() if peer.state == "T"]
        texts = _stacks_of(stopped)
        return "\n".join(_headed(self.peers[rank], text) for rank, text in sorted(texts.items()))

    def remove(self) -> None:
        """The pages of all ranks."""
        for peer in self.peers.values():
            remove(peer.page.path)


def _stacks_of(peers: Sequence[Peer]) -> dict[int, str]:
    """The stacks of each rank, asked for at once; empty where none come in time."""
    before = {peer.about.rank: _size(peer.stacks_file()) for peer in peers}
    for peer in peers:
        _dump_collectives(peer)
        send_to_main_thread(peer.about.pid, peer.about.process_start, STACKS_SIGNAL)
        if peer.state == "T":
            peer.send(signal.SIGCONT)
    deadline, waited_for, sizes = time.monotonic() + _STACKS_S, list(peers), dict(before)
    while waited_for and time.monotonic() < deadline:
        time.sleep(0.02)
        now = {peer.about.rank: _size(peer.stacks_file()) for peer in waited_for}
        waited_for = [
            peer for peer in waited_for
            if not now[peer.about.rank] == sizes[peer.about.rank] > before[peer.about.rank]
        ]  # fmt: skip
        sizes |= now
    return {peer.about.rank: _take(peer.stacks_file(), before[peer.about.rank]) for peer in peers}


def _take(file: Path, begin: int) -> str:
    """What has been written from byte ``begin`` on; the file, which costs the node's memory, is empty after that."""
    text = ""
    with contextlib.suppress(OSError):
        text = file.read_bytes()[begin:].decode(errors="replace")
        os.truncate(file, 0)
    return text


def _dump_collectives(peer: Peer) -> None:
    """Ask torch's NCCL flight recorder for its file, by the pipe that the rank has named to it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(peer.page.path.with_suffix(".pipe"), os.O_WRONLY | os.O_NONBLOCK)
        os.write(descriptor, b"1\n")
        os.close(descriptor)


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def _headed(peer: Peer, text: str) -> str:
    at = peer.reading
    head = f"==== rank {peer.about.rank} of {peer.about.world_size} on {peer.about.host}, pid {peer.about.pid}"
    return f"{head}, iteration {at.iteration}, phase {at.phase}, state {peer.state}\n{text or 'no stacks came'}\n"


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-3, 7``."""
    text = listed(merged((rank, rank + 1) for rank in ranks), "d")
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
