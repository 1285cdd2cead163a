"""An object's bytes as one array, into which files of blocks are mapped as they are wanted.

So a window of tokens is a slice of an array, as of a shard on a disk, whatever blocks it lies in, and no file is opened
for it. What is not mapped cannot be read at all.
"""

import ctypes
import mmap
import os

import numpy as np

MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000
"""Of Linux on x86-64 and aarch64 (asm-generic/mman.h); Python's mmap has neither."""
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_FAILED = ctypes.c_void_p(-1).value
_NOTHING = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE


class BlockMap:
    """``size`` bytes of addresses: no memory until a block is mapped, and then that of the page cache."""

    def __init__(self, size: int, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._length = -(-size // block_bytes) * block_bytes
        self._address = _map(None, self._length, 0, _NOTHING, -1)
        self.bytes = np.frombuffer((ctypes.c_uint8 * size).from_address(self._address), np.uint8)
        """[size] uint8. To read what is not mapped ends the process (SIGSEGV)."""
        count = self._length // block_bytes
        self.is_mapped = np.zeros(count, bool)
        self.with_next = np.zeros(count, bool)
        """Whether a block and the one behind it, where there is one, are mapped: one look tells of a whole window."""

    def put(self, number: int, descriptor: int) -> None:
        """Map a block's file; it may be closed and removed then."""
        start = self._address + number * self._block_bytes
        _map(start, self._block_bytes, mmap.PROT_READ, mmap.MAP_SHARED | MAP_FIXED | mmap.MAP_POPULATE, descriptor)
        self.is_mapped[number] = True
        self.with_next[-1] = self.is_mapped[-1]
        np.logical_and(self.is_mapped[:-1], self.is_mapped[1:], out=self.with_next[:-1])

    def clear(self) -> None:
        """Let go of all blocks."""
        _map(self._address, self._length, 0, _NOTHING | MAP_FIXED, -1)
        self.is_mapped[:] = self.with_next[:] = False


def _map(address: int | None, length: int, rights: int, flags: int, descriptor: int) -> int:
    found = _LIBC.mmap(address, length, rights, flags, descriptor, 0)
    if found is None or found == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)} (mmap of {length:,} bytes)")
    return int(found)
