"""Compressed files as streams that end with an error rather than fill the memory or the disk."""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from program.errors import UserError

ALLOWANCE_BYTES = 64 << 20
"""What any file may unpack to, however small it is."""
PACKED_BYTES = 4096
"""Read at a time of a .zst file: it may say 32,000 bytes with one, and all of them are in memory at once."""
MOST_MEMORY = 128 << 20
"""What an .xz file may ask for to be unpacked: its header says how far back it points, and all of it is taken."""
MOST_WINDOW = 2 << 30
"""The same of a .zst file: what `zstd --long=31` makes, the most that zstd makes. Memory is touched as it is filled, so
that it takes no more than what the file unpacks to."""
ENDINGS = (".gz", ".zst", ".bz2", ".xz")
MOST_PADDING = 1 << 20
"""Bytes of zeros in a row, as gzip and xz allow them behind the content; more is a file that grew without content."""
BZ2_BLOCKS = (b"1AY&SY", b"\x17rE8P\x90")
"""What begins a block, or ends a file without any."""


def compression_of(head: bytes) -> str:
    """One of ENDINGS by the first bytes of a file; nothing for what is not packed."""
    if head.startswith(b"\x1f\x8b\x08"):
        return ".gz"
    if head.startswith(b"\x28\xb5\x2f\xfd") or (head[1:4] == b"\x2a\x4d\x18" and 0x50 <= head[0] < 0x60):
        return ".zst"
    if head.startswith(b"\xfd7zXZ\0"):
        return ".xz"
    is_bz2 = head.startswith(b"BZh") and head[3:4].isdigit() and head.startswith(BZ2_BLOCKS, 4)
    return ".bz2" if is_bz2 else ""


def head(packed: BinaryIO, compression: str, path: Path, count: int) -> bytes | None:
    """The first `count` bytes, or all, of what a file unpacks to; None where it is damaged before them."""
    stream = _decompressor(compression, packed, path)
    found = bytearray(count)
    filled = 0
    try:
        while filled < count and (size := stream.readinto(memoryview(found)[filled:])):
            filled += size
    except Exception as error:
        if not _is_damage(error):
            raise
        if not filled:
            return None
    return bytes(found[:filled])


class Unpacked(io.RawIOBase):
    """A compressed file's content; reading raises UserError where it is damaged or unpacks beyond measure."""

    def __init__(
        self, packed: BinaryIO, compression: str, path: str, size: int, max_expansion: float, flag: str
    ) -> None:
        """packed: is closed with this. size: the file's. max_expansion: unpacked bytes for each packed one, beyond
        which a file is taken for a bomb. flag: what the user sets it with.
        """
        self._path, self._packed = path, packed
        self._stream = _decompressor(compression, packed, Path(path))
        self._limit = int(size * max_expansion) + ALLOWANCE_BYTES
        self._max_expansion, self._flag = max_expansion, flag
        self._unpacked_bytes = 0

    def readable(self) -> bool:
        return True

    @property
    def packed_bytes(self) -> int:
        """Bytes of the file that have been read."""
        return self._packed.tell()

    def readinto(self, buffer: Any) -> int:
        try:
            count = self._stream.readinto(buffer)
        except Exception as error:
            if not _is_damage(error):
                raise
            if asks := _asks_for_memory(error):
                raise UserError(f"{self._path}: {asks}") from None
            raise self._damaged(error) from None
        self._unpacked_bytes += count
        if self._unpacked_bytes > self._limit:
            raise UserError(
                f"{self._path}: unpacks to more than {self._limit / 1e6:,.0f} MB, over {self._max_expansion:g} bytes "
                f"for each of its own: damaged, or made to fill a disk. If it is right, raise {self._flag}."
            )
        return count

    def close(self) -> None:
        if not self.closed:
            self._packed.close()
        super().close()

    def _damaged(self, error: Exception) -> UserError:
        return UserError(
            f"{self._path}: cannot be unpacked after {self._unpacked_bytes} bytes ({type(error).__name__}: {error}): "
            "truncated or damaged."
        )


def _is_damage(error: Exception) -> bool:
    """Of errors while unpacking. A MemoryError, for one, is none."""
    kinds = (EOFError, OSError, zlib.error, lzma.LZMAError, ValueError)
    return isinstance(error, kinds) or type(error).__name__ == "ZstdError"


def _asks_for_memory(error: Exception) -> str:
    """What to say of a file that needs a larger window than is given; empty of another error."""
    text, most, fix = str(error).lower(), 0, ""
    if "too much memory" in text:
        most, fix = MOST_WINDOW, "zstd --long=31 or less"
    elif "memory usage limit" in text:
        most, fix = MOST_MEMORY, "xz -9 or less"
    return fix and (
        f"points back further than the {most >> 20:,} MiB of memory that a file gets here to be unpacked. Compress it "
        f"again, with {fix}."
    )


class _Stream(Protocol):
    def readinto(self, buffer: Any) -> int: ...


class _Packed:
    """A packed file whose reader does not walk for hours over zeros: GzipFile skips padding byte by byte.

    Raises EOFError after MOST_PADDING of them.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._zeros = file, 0

    def read(self, size: int = -1) -> bytes:
        packed = self._file.read(size)
        self._zeros = 0 if packed.strip(b"\0") else self._zeros + len(packed)
        if self._zeros > MOST_PADDING:
            raise EOFError(f"more than {MOST_PADDING:,} bytes of zeros")
        return packed


def _decompressor(compression: str, file: BinaryIO, path: Path) -> _Stream:
    packed: Any = _Packed(file)
    if compression == ".gz":
        return gzip.GzipFile(fileobj=packed)
    if compression == ".bz2":
        return _StreamsReader(packed, bz2.BZ2Decompressor)
    if compression == ".xz":
        return _StreamsReader(packed, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MOST_MEMORY))
    try:
        import zstandard
    except ImportError:
        raise UserError(f"{path}: .zst needs `pip install zstandard`.") from None
    return _ZstdReader(zstandard, packed)


class _StreamsReader:
    """An .xz or .bz2 file's content, stream after stream. LZMAFile would take whatever memory a header asks for, and
    BZ2File says nothing of what stands behind the last stream."""

    def __init__(self, packed: _Packed, begin: Callable[[], Any]) -> None:
        """begin: makes a stream's decompressor."""
        self._packed, self._rest, self._begin = packed, b"", begin
        self._stream: Any = None

    def readinto(self, buffer: Any) -> int:
        found = b""
        while not found and self._has_more():
            self._stream = self._stream or self._begin()
            found = self._stream.decompress(self._rest, len(buffer))
            self._rest = b""
            if self._stream.eof:
                self._rest, self._stream = self._stream.unused_data.lstrip(b"\0"), None  # streams may be padded
        buffer[: len(found)] = found
        return len(found)

    def _has_more(self) -> bool:
        """Read on where there is nothing to unpack. Raises EOFError within a stream."""
        if self._rest or (self._stream is not None and not self._stream.needs_input):
            return True
        while not self._rest and (packed := self._packed.read(PACKED_BYTES)):
            self._rest = packed if self._stream is not None else packed.lstrip(b"\0")
        if not self._rest and self._stream is not None:
            raise EOFError("the file ends within a stream")
        return bool(self._rest)


class _ZstdReader:
    """A .zst file's content, frame after frame. zstandard's own stream takes a truncated file for a short one."""

    def __init__(self, zstandard: Any, packed: _Packed) -> None:
        # Frames say how large a window they need.
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=MOST_WINDOW)
        self._packed = packed
        self._frame: Any = None
        self._ready = memoryview(b"")

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            packed = self._packed.read(PACKED_BYTES)
            if not packed:
                if self._frame is not None:
                    raise EOFError("the file ends within a frame")
                return 0
            self._ready = memoryview(self._unpack(packed))
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _unpack(self, packed: bytes) -> bytes:
        pieces = []
        while packed:
            self._frame = self._frame or self._decompressor.decompressobj()
            pieces.append(self._frame.decompress(packed))
            packed = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        return b"".join(pieces)
