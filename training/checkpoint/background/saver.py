"""A rank's side of saving in the background: copy, hand over, and hear what came of it.

A thread copies tensors into shared memory while forward and backward passes run.
"""

import contextlib
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel.regions import Box
from program import host_memory
from training.checkpoint.background.messages import Commit, MessageSocket, Outcome, PieceInMemory, Write
from training.checkpoint.background.process import NOT_FOR_US
from training.checkpoint.format.pieces import TensorGroup
from training.checkpoint.optimizer_state import PREFIX as UNTIL_UPDATE
from training.checkpoint.storage import file_name, grouped


class HostCopy(threading.Thread):
    """Copies (target, source) pairs of uint8 tensors. Sources must stay as they are until ``finish``.

    On a GPU the copies go through a stream of their own, behind what this thread's creator has asked for so far.
    """

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        super().__init__(name="checkpoint-copy", daemon=True)
        self.pairs = pairs
        self.error: Exception | None = None
        self.device = next((source.device for _, source in pairs if source.is_cuda), None)
        self.stream = None
        if self.device is not None:
            self.stream = torch.cuda.Stream(self.device)
            self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def run(self) -> None:
        """The thread. torch lets go of Python's lock while it copies."""
        try:
            if self.stream is None:
                self._copy()
            else:
                with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
                    self._copy()
                self.stream.synchronize()
        except Exception as error:
            self.error = error

    @torch.no_grad()
    def _copy(self) -> None:
        for target, source in self.pairs:
            target.copy_(source, non_blocking=True)

    def finish(self) -> None:
        """Wait for the end. Raises what went wrong."""
        self.join()
        if self.error is not None:
            raise self.error


def flat_bytes(data: Tensor) -> Tensor:
    """uint8 [bytes]: the memory of a contiguous tensor."""
    return data.detach().contiguous().reshape(-1).view(torch.uint8)


def pin(memory: Tensor) -> bool:
    """Let a GPU copy into this memory directly; whether it may (cudaHostRegister). Copies are slower without.

    A refusal also stays CUDA's last error, which the next kernel's launch would raise: one is launched to take it.
    """
    runtime = torch.cuda.cudart()
    if runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0) == runtime.cudaError.success:
        return True
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return False


def unpin(memory: Tensor) -> None:
    """Before memory that was pinned is given back."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


ROOT = Path(__file__).resolve().parents[3]
SPARE_HOST_BYTES = 1 << 30  # left to other processes on the host beside a copy in memory


class BackgroundWriter:
    """The writer process of this rank, and the memory that they share: as large as what the rank writes.

    It is a fresh program (exec), so it inherits no thread, no CUDA and no lock. It outlives the rank by what it was
    asked for: a checkpoint that is copied everywhere is committed even where all ranks are killed right then.
    """

    def __init__(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        self.rank, self.lines = rank, MessageSocket(ours)
        self._descriptor = os.memfd_create("triplane-checkpoint")
        self._memory: Tensor | None = None
        self._size, self._unanswered = 0, 0
        self.is_pinned = False
        self._copy: HostCopy | None = None
        self._unsent: list[Write | Commit] = []
        words, given = ("training.checkpoint.background.process",), (theirs.fileno(), self._descriptor)
        self._process = companion(*words, *map(str, given), pass_fds=given, stdin=subprocess.DEVNULL)
        theirs.close()

    def reserve(self, total: int, *, pinned: bool) -> None:
        """Take shared memory of ``total`` bytes; pinned: for copies from a GPU. Raises OSError where there is less."""
        self._make_room(total, pinned=pinned)

    def hand_over(self, folder: Path, boxes: Sequence[Box]) -> None:
        """Begin to copy what this rank writes; the process writes it when ``finish_copy`` has seen it copied.

        The optimizer's state stays as it is until the next update, so it is copied by a thread, while forward and
        backward passes run; all else is copied here. ``lacks_memory`` is to be asked before. Raises OSError where the
        last one is still being written.
        """
        if self.is_busy:
            raise OSError(f"rank {self.rank} is still writing the checkpoint before")
        alike = list(grouped(boxes))
        total = sum(box.data.nbytes for _, same in alike for box in same)
        self._make_room(total, pinned=any(box.data.is_cuda for box in boxes))
        position, groups, pieces = 0, dict[TensorGroup, int](), []
        later = list[tuple[Tensor, Tensor]]()
        for group, same in alike:
            for box in same:
                pair = self._target(position, box.data.nbytes), flat_bytes(box.data)
                if box.key.startswith(UNTIL_UPDATE):
                    later.append(pair)
                else:
                    pair[0].copy_(pair[1])
                position += box.data.nbytes
            number = groups.setdefault(group, len(groups))
            pieces.append(PieceInMemory(group=number, offset=same[0].offset, shape=tuple(same[0].data.shape)))
        write = Write(
            folder=str(folder.absolute()),
            name=file_name(self.rank),
            groups=tuple(groups),
            pieces=tuple(pieces),
            total_bytes=total,
        )
        self._copy, self._unsent = HostCopy(later), [write]
        self._copy.start()

    def lacks_memory(self, total: int, ranks_here: int) -> str | None:
        """Why a copy of ``total`` bytes for each of this host's ranks cannot be made; None where it can."""
        available = host_memory.available_bytes()
        if total <= self._size or (total - self._size) * ranks_here + SPARE_HOST_BYTES <= available:
            return None
        return (
            f"copies of {ranks_here} ranks' shares in host memory take {total * ranks_here:,} bytes, and "
            f"{available:,.0f} are available on {os.uname().nodename}"
        )

    def commit(self, message: Commit) -> None:
        """On one rank, behind ``hand_over``: commit when all writers are done."""
        self._unsent.append(message)

    def finish_copy(self) -> None:
        """Wait until everything is copied, and let the process write it. To be called before the next update."""
        if self._copy is not None:
            self._copy.finish()
            self._copy = None
        while self._unsent:
            with contextlib.suppress(OSError):  # the process has gone: ``outcomes`` tells
                self.lines.send(self._unsent[0])
            self._unsent.pop(0)
            self._unanswered += 1

    def outcomes(self, timeout_s: float, beat: Callable[[], None] = lambda: None) -> Iterator[Outcome]:
        """What came of the messages so far; waits at most ``timeout_s`` for all that are under way.

        beat: called every second of waiting, which ends by itself, so that it is not taken for a hang.

        Raises ChildProcessError where the process has gone before its time.
        """
        deadline = time.monotonic() + timeout_s
        if timeout_s:
            self.finish_copy()
        while self._unanswered:
            try:
                outcome = self.lines.receive(min(1.0, max(0.0, deadline - time.monotonic())))
            except (EOFError, OSError):
                self._unanswered = 0
                code = self._process.wait(5)
                raise ChildProcessError(f"the writer process of rank {self.rank} ended with {code}") from None
            if outcome is None and time.monotonic() < deadline:
                beat()
                continue
            if outcome is None:
                return
            assert isinstance(outcome, Outcome)
            self._unanswered -= 1
            yield outcome

    @property
    def is_busy(self) -> bool:
        """Whether something is under way."""
        return self._unanswered > 0 or bool(self._unsent)

    def close(self) -> None:
        """Let the process end when it is done."""
        self.finish_copy()
        self._unpin()
        self.lines.channel.close()
        os.close(self._descriptor)
        self._process.wait()

    def _make_room(self, total: int, *, pinned: bool) -> None:
        """Shared memory of at least ``total`` bytes; kept from save to save."""
        if total <= self._size:
            return
        os.posix_fallocate(self._descriptor, 0, total)  # an error here; a store into pages that are not there is SIGBUS
        self._unpin()
        self._memory = torch.frombuffer(mmap.mmap(self._descriptor, total), dtype=torch.uint8)
        self._size = total
        if pinned:
            self.is_pinned = pin(self._memory)

    def _unpin(self) -> None:
        if self.is_pinned and self._memory is not None:
            unpin(self._memory)
        self.is_pinned = False

    def _target(self, position: int, size: int) -> Tensor:
        """uint8 [size], in the shared memory."""
        assert self._memory is not None or not size
        return torch.empty(0, dtype=torch.uint8) if self._memory is None else self._memory[position : position + size]


def companion(module: str, *words: str, **more: Any) -> subprocess.Popen[bytes]:
    """A program of Triplane beside this rank. It never hears ``NOT_FOR_US``, not even before it has said so itself."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, NOT_FOR_US)
    try:
        return subprocess.Popen([sys.executable, "-m", module, *words], cwd=ROOT, start_new_session=True, **more)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
