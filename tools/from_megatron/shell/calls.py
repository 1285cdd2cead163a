"""Calls of a sealed process (``seal``), as they wait for their answers: who asks, for which file, to do what."""

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

from tools.from_megatron.shell.seal import ASKED, numbers

_RECEIVE, _SEND, _VALID, _ADD_FILE = 0xC0502100, 0xC0182101, 0x40082102, 0x40182103
_CONTINUE = 1
_PAGE = 4096
_STAT = {"x86_64": "<16xQIII12xqqq72x", "aarch64": "<16xIIII16xqi4xq56x"}
"""struct stat: links and mode (here the other way round), owners, size, a block's size, their number."""
_PIDFD_GETFD = 438
_AT = {"openat": 1, "newfstatat": 1, "faccessat": 1, "faccessat2": 1, "readlinkat": 1}
"""Calls whose first argument is a folder's descriptor, and the place of their path; of others it is the first."""


@dataclass(frozen=True, slots=True)
class Call:
    """A system call that waits."""

    id: int
    process: int
    name: str
    arguments: tuple[int, ...]

    @property
    def flags(self) -> int:
        """Of open and its like."""
        return self.arguments[_AT.get(self.name, 0) + 1]

    def path(self) -> str | None:
        """Its path; None where it cannot be read."""
        parts, at = list[bytes](), self.arguments[_AT.get(self.name, 0)]
        try:
            with Path(f"/proc/{self.process}/mem").open("rb", 0) as memory:
                while sum(map(len, parts)) < _PAGE:
                    part = os.pread(memory.fileno(), _PAGE - at % _PAGE, at)
                    end = part.find(b"\0")
                    parts.append(part if end < 0 else part[:end])
                    if end >= 0 or not part:
                        break
                    at += len(part)
        except OSError:
            return None
        return os.fsdecode(b"".join(parts))

    def by_descriptor(self) -> bool:
        """Whether its path is relative to another folder than the process's own, or to a file that is open."""
        here = ctypes.c_int32(self.arguments[0] & 0xFFFFFFFF).value
        return self.name in _AT and here != -100


class Listener:
    """Where a sealed process's calls arrive. process: one that has called ``seal``; number: what that returned."""

    def __init__(self, process: int, number: int) -> None:
        handle = os.pidfd_open(process)
        try:
            self.descriptor = int(ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, handle, number, 0))
        finally:
            os.close(handle)
        if self.descriptor < 0:
            raise OSError(ctypes.get_errno(), "pidfd_getfd")
        os.set_inheritable(self.descriptor, False)
        self._names = numbers(ASKED)

    def receive(self) -> Call | None:
        """The next one; None where who asked has been ended."""
        waiting = bytearray(80)
        try:
            fcntl.ioctl(self.descriptor, _RECEIVE, waiting)
        except OSError:
            return None
        id_, process, _, number, *_ = struct.unpack_from("=QIIiI", waiting)
        return Call(id_, process, self._names[number], struct.unpack_from("=6Q", waiting, 32))

    def waits(self, call: Call) -> bool:
        """Whether who asked is still there: its number may be another process's by now."""
        try:
            fcntl.ioctl(self.descriptor, _VALID, struct.pack("=Q", call.id))
        except OSError:
            return False
        return True

    def go_on(self, call: Call) -> None:
        """Let the kernel do it."""
        self._answer(struct.pack("=QqiI", call.id, 0, 0, _CONTINUE))

    def fail(self, call: Call, error: int) -> None:
        """Answer with an error; 0: it is said to be done."""
        self._answer(struct.pack("=QqiI", call.id, 0, -error, 0))

    def give(self, call: Call, file: int) -> None:
        """Answer an open with a file that is open here, and close it here."""
        close_on_exec = call.flags & os.O_CLOEXEC
        try:
            number = fcntl.ioctl(
                self.descriptor, _ADD_FILE, bytearray(struct.pack("=QIIII", call.id, 0, file, 0, close_on_exec))
            )
            self._answer(struct.pack("=QqiI", call.id, number, 0, 0))
        except OSError:
            self.fail(call, errno.EMFILE)
        finally:
            os.close(file)

    def describe(self, call: Call, mode: int, size: int) -> None:
        """Answer a stat with a file of that mode, or an access."""
        if call.name.startswith(("stat", "lstat", "newfstatat")):
            machine = platform.machine()
            links_and_mode = (1, mode) if machine == "x86_64" else (mode, 1)
            found = struct.pack(_STAT[machine], *links_and_mode, 0, 0, size, _PAGE, 1)
            with contextlib.suppress(OSError), Path(f"/proc/{call.process}/mem").open("wb", 0) as memory:
                if not self.waits(call):
                    return
                os.pwrite(memory.fileno(), found, call.arguments[_AT.get(call.name, 0) + 1])
        self.fail(call, 0)

    def _answer(self, said: bytes) -> None:
        with contextlib.suppress(OSError):  # who asked may have been ended
            fcntl.ioctl(self.descriptor, _SEND, said)


FILE, FOLDER = stat.S_IFREG | 0o755, stat.S_IFDIR | 0o755
