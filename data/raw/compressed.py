"""Compressed files as streams that end with an error rather than fill the memory or the disk."""

import gzip
import io
import zlib
from pathlib import Path
from typing import Any, BinaryIO

from data.raw.inputs import Source
from parallel.errors import UserError

ALLOWANCE_BYTES = 64 << 20
"""What any file may unpack to, however small it is."""
PACKED_BYTES = 4096
"""Read at a time of a .zst file: it may say 32,000 bytes with one, and all of them are in memory at once."""


class Unpacked(io.RawIOBase):
    """A .gz or .zst file's content; reading raises UserError where it is damaged or unpacks beyond measure."""

    def __init__(self, source: Source, max_expansion: float, flag: str) -> None:
        """max_expansion: unpacked bytes for each packed one, beyond which a file is taken for a bomb. flag: what the
        user sets it with.
        """
        self._path = source.path
        self._packed = Path(source.path).open("rb")  # noqa: SIM115  closed with this
        self._stream: Any = _decompressor(source, self._packed)
        self._limit = int(source.size * max_expansion) + ALLOWANCE_BYTES
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
        except (EOFError, OSError, zlib.error, ValueError) as error:
            raise self._damaged(error) from None
        except Exception as error:
            if type(error).__name__ != "ZstdError":
                raise
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


def _decompressor(source: Source, packed: BinaryIO) -> Any:
    if source.compression == ".gz":
        return gzip.GzipFile(fileobj=packed)
    try:
        import zstandard
    except ImportError:
        raise UserError(f"{source.path}: .zst needs `pip install zstandard`.") from None
    return _ZstdReader(zstandard, packed)


class _ZstdReader:
    """A .zst file's content, frame after frame. zstandard's own stream takes a truncated file for a short one."""

    def __init__(self, zstandard: Any, packed: BinaryIO) -> None:
        # Frames say how large a window they need; without a limit a few bytes could ask for gigabytes of memory.
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 27)
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
