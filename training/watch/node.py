"""The ranks of one node as its watchdogs see them: who stands still since when. No torch here.

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

from training.watch.process import lives, moved_bytes, send, status
from training.watch.pulse import STACKS_SIGNAL, SUFFIX, Page, Reading, remove
from training.watch.stacks import Stand, stand

LOOK_S = 0.25
"""Between two looks of a watchdog: 32 wake-ups a second on a node of 8 ranks, each of 0.1 ms."""
_BUSY = 0.2
"""Of a core: a rank that tokenises or packs has no beats, but it computes."""
_MOVING_BYTES_PER_S = 1e5
"""A rank that reads or writes its data or a checkpoint has none either, but it moves bytes."""
_WORKS = {"data": (True, True), "load": (False, True), "save": (False, True)}
"""Phases in which computing, or moving bytes, is progress."""
_TICKS_PER_S = 100  # USER_HZ, the same on every Linux
_STACKS_S = 3.0
"""A process that does not write its stacks within that is in the kernel (state D) or has lost its memory."""
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
    stand: Stand | None = None


class Peer:
    """One rank of this node, looked at again and again."""

    def __init__(self, page: Page) -> None:
        self.page, self.about = page, page.about
        self.reading: Reading = page.read()
        self.state, self.still_s = "R", 0.0
        self._signed, self._unsigned_s = page.watchdog(), 0.0
        self._ticks, self._bytes = 0, 0
        self._stand: Stand | None = None

    def look(self, passed_s: float) -> None:
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
        pid, start, _, done = self._signed
        return pid > 0 and not done and self._unsigned_s < STILL_ASKED_S and lives(pid, start or None)

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


class Node:
    """All ranks of this node whose pages begin like ``path``'s, that of ``own``."""

    def __init__(self, own: Page) -> None:
        self.prefix = own.path.name[: own.path.name.rindex("-") + 1]
        self.folder, self.own = own.path.parent, own.about.rank
        self.peers: dict[int, Peer] = {own.about.rank: Peer(own)}
        self._looked_s = time.monotonic()

    def look(self) -> None:
        """Look at every rank; new ones are found as they come."""
        now = time.monotonic()
        passed_s = min(now - self._looked_s, 4 * LOOK_S)
        self._looked_s = now
        for path in self.folder.glob(f"{self.prefix}*{SUFFIX}"):
            with contextlib.suppress(OSError, ValueError, TypeError):
                rank = int(path.stem[len(self.prefix) :])
                known = self.peers.get(rank)
                if known is None or known.page.inode != path.stat().st_ino:
                    self.peers[rank] = Peer(Page(path))
        for peer in self.peers.values():
            peer.look(passed_s)

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
        """Make every rank write its stacks: their text. One that was stopped goes on for that moment only."""
        left = [peer for peer in self.peers.values() if not peer.is_gone]
        texts = {}
        for peer in sorted(left, key=lambda peer: peer.state == "T"):
            texts[peer.about.rank] = _stacks_of(peer)
            peer.take_stand(texts[peer.about.rank])
        return "\n".join(_headed(self.peers[rank], text) for rank, text in sorted(texts.items()))

    def remove(self) -> None:
        """The pages of all ranks."""
        for peer in self.peers.values():
            remove(peer.page.path)


def _stacks_of(peer: Peer) -> str:
    file = peer.stacks_file()
    before = _size(file)
    _dump_collectives(peer)
    peer.send(STACKS_SIGNAL)
    if peer.state == "T":
        peer.send(signal.SIGCONT)
    deadline, size = time.monotonic() + _STACKS_S, before
    while time.monotonic() < deadline:
        time.sleep(0.02)
        now = _size(file)
        if now == size > before:
            break
        size = now
    if peer.state == "T":
        peer.send(signal.SIGSTOP)
    with contextlib.suppress(OSError):
        return file.read_bytes()[before:].decode(errors="replace")
    return ""


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
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    text = ", ".join("-".join(map(str, run)) for run in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
