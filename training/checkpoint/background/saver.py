"""A rank's side of saving in the background: copy, hand over, and hear what came of it."""

import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from training.checkpoint.background.messages import Commit, Lines, Outcome, PieceInMemory, Write
from training.checkpoint.boxes import Box
from training.checkpoint.format.pieces import Group
from training.checkpoint.storage import file_name, grouped

ROOT = Path(__file__).resolve().parents[3]
SPARE_HOST_BYTES = 1 << 30  # left to everybody else on the host beside a copy in memory


class BackgroundWriter:
    """The writer process of this rank, and the memory that they share: as large as what the rank writes.

    It is a fresh program (exec), so it inherits no thread, no CUDA and no lock. It outlives the rank by what it was
    asked for: a checkpoint that is copied everywhere is committed even where a rank is killed right then.
    """

    def __init__(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        self.rank, self.lines = rank, Lines(ours)
        self._descriptor = os.memfd_create("triplane-checkpoint")
        self._memory: Tensor | None = None
        self._size, self._unheard = 0, 0
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "training.checkpoint.background.process",
                str(theirs.fileno()),
                str(self._descriptor),
            ],
            pass_fds=(theirs.fileno(), self._descriptor),
            cwd=ROOT,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
        )
        theirs.close()

    def hand_over(self, folder: Path, boxes: Sequence[Box]) -> None:
        """Copy what this rank writes, and let the process write it. Training stands still for this alone.

        Raises OSError where the host has no memory for the copy, or the last one is still being written.
        """
        if self.is_busy:
            raise OSError(f"rank {self.rank} is still writing the checkpoint before")
        alike = list(grouped(boxes))
        total = sum(box.data.nbytes for _, same in alike for box in same)
        self._make_room(total)
        position, groups, pieces = 0, dict[Group, int](), []
        for group, same in alike:
            for box in same:
                self._copy(box.data, position)
                position += box.data.nbytes
            number = groups.setdefault(group, len(groups))
            pieces.append(PieceInMemory(group=number, offset=same[0].offset, shape=tuple(same[0].data.shape)))
        self._send(
            Write(
                folder=str(folder.absolute()),
                name=file_name(self.rank),
                groups=tuple(groups),
                pieces=tuple(pieces),
                total_bytes=total,
            )
        )

    def commit(self, message: Commit) -> None:
        """On one rank, behind ``hand_over``: commit when all writers are done."""
        self._send(message)

    def outcomes(self, timeout_s: float) -> Iterator[Outcome]:
        """What came of the messages so far; waits at most ``timeout_s`` for all that are under way.

        Raises ChildProcessError where the process has gone before its time.
        """
        deadline = time.monotonic() + timeout_s
        while self._unheard:
            try:
                outcome = self.lines.receive(max(0.0, deadline - time.monotonic()))
            except (EOFError, OSError):
                self._unheard = 0
                code = self._process.wait(5)
                raise ChildProcessError(f"the writer process of rank {self.rank} ended with {code}") from None
            if outcome is None:
                return
            assert isinstance(outcome, Outcome)
            self._unheard -= 1
            yield outcome

    @property
    def is_busy(self) -> bool:
        """Whether something is under way."""
        return self._unheard > 0

    def close(self) -> None:
        """Let the process end when it is done."""
        self.lines.channel.close()
        os.close(self._descriptor)
        self._process.wait()

    def _send(self, message: Write | Commit) -> None:
        self.lines.send(message)
        self._unheard += 1

    def _make_room(self, total: int) -> None:
        """Shared memory of at least ``total`` bytes; kept from save to save."""
        if total <= self._size:
            return
        available = available_host_bytes()
        if total - self._size + SPARE_HOST_BYTES > available:
            raise OSError(
                f"a copy of this rank's share in host memory takes {total:,} bytes, but only {available:,} are "
                "available. Set checkpoint.async_save = false."
            )
        os.ftruncate(self._descriptor, total)
        self._memory = torch.frombuffer(mmap.mmap(self._descriptor, total), dtype=torch.uint8)
        self._size = total

    def _copy(self, data: Tensor, position: int) -> None:
        if data.numel():
            assert self._memory is not None
            flat = data.detach().contiguous().reshape(-1).view(torch.uint8)
            self._memory[position : position + flat.numel()].copy_(flat)


def available_host_bytes() -> int:
    """What the kernel says can be used without swapping (/proc/meminfo)."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
