"""A shard's manifest, `X.json` beside `X.bin` and `X.idx`: what is in it, how it was made, and its checksums."""

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

from program.errors import UserError
from program.schema import INT64, Count, Range
from program.untrusted import InputError, open_regular, parse_json, read_bytes

FORMAT = 1
BLOCK_BYTES = 64 << 20
"""What has a checksum of its own, so that damage is named by its range."""
MOST_BYTES = 256 << 20
"""Of a manifest: 40 a block."""
END_BYTES = 4096
"""What every start reads of a file's beginning and of its end: one page of a file system each."""
BEGINNING = b'{\n "format": '
"""How every manifest begins: a line that is no JSON, which no .jsonl file holds."""


def manifest_path(prefix: Path) -> Path:
    """`X` -> `X.json`."""
    return prefix.with_name(prefix.name + ".json")


@dataclass(frozen=True, slots=True)
class FileSum:
    """A file's size in bytes, and the blake2b of each block, of all of them, and of its ends."""

    size: Count
    blake2b: str
    """Of the block digests, one after another, so that blocks can be checked one by one."""
    blocks: tuple[str, ...]
    """Empty in what training keeps of a manifest: there it would grow with the corpus."""
    ends: str = ""
    """Of the first and the last END_BYTES, which every start checks; "" in manifests from before 2026-11-22."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardManifest:
    """What `X.json` says."""

    format: Annotated[int, Range(1, FORMAT)] = FORMAT
    tokens: Count
    documents: Count
    dtype: str
    vocab_size: Annotated[int, Range(1, 1 << 31)]
    tokenizer: str
    """Name of its file, or "byte"."""
    tokenizer_fingerprint: str
    """Hex digest of the tokenizer, which must be that of data.tokenizer."""
    eod: Annotated[int, Range(0, (1 << 31) - 1)]
    append_eod: bool
    """Whether `eod` ends every document."""
    special_text: str
    """What became of the text of control tokens: plain, special or error."""
    engine: str = ""
    """What encoded it, as the output's plan has it; "" in manifests from before 2026-11-22."""
    source: tuple[str, ...] = ()
    """The inputs, as `PATH[first byte:end]` or `PATH[first row group:end]`."""
    counts: dict[str, Count] = field(default_factory=dict)
    """What was seen while it was made: `text_bytes`, `empty`, `rejected`, `special_text`."""
    rejected: tuple[str, ...] = ()
    """Place and reason of the first documents that were left out."""
    files: dict[str, FileSum] = field(default_factory=dict)
    """`bin` and `idx`."""

    def without_blocks(self) -> "ShardManifest":
        """What a start needs, and not more memory for more tokens."""
        files = {name: replace(one, blocks=()) for name, one in self.files.items()}
        return replace(self, source=(), counts={}, rejected=(), files=files)

    def dump(self) -> str:
        """The file's text; equal for equal contents."""
        return json.dumps(asdict(self), indent=1) + "\n"


class BlockSums:
    """Checksums of a file, made while it is written: BLAKE2b (RFC 7693) with digests of 16 bytes."""

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self._block_bytes = block_bytes
        self._blocks: list[str] = []
        self._open = hashlib.blake2b(digest_size=16)
        self._size = 0
        self._head = self._tail = b""

    def update(self, data: memoryview) -> None:
        """Take the next bytes. data: one-dimensional, of bytes."""
        self._head += bytes(data[: END_BYTES - len(self._head)])
        self._tail = (self._tail + bytes(data[-END_BYTES:]))[-END_BYTES:]
        start = 0
        while start < len(data):
            room = self._block_bytes - self._size % self._block_bytes
            piece = data[start : start + room]
            self._open.update(piece)
            self._size += len(piece)
            start += len(piece)
            if self._size % self._block_bytes == 0:
                self._close_block()

    def result(self) -> FileSum:
        """Of all that was taken."""
        blocks = [*self._blocks, *([self._open.hexdigest()] if self._size % self._block_bytes else [])]
        whole = _digest("".join(blocks).encode())
        return FileSum(self._size, whole, tuple(blocks), _digest(self._head + self._tail))

    def _close_block(self) -> None:
        self._blocks.append(self._open.hexdigest())
        self._open = hashlib.blake2b(digest_size=16)


@dataclass(frozen=True, slots=True)
class _Format:
    format: Annotated[int, Range(1, INT64 - 1)]


def read_manifest(prefix: Path) -> ShardManifest | None:
    """The manifest of a shard; None where it has none, as Megatron's have none.

    Raises UserError for one that cannot be read, or of a later format.
    """
    path = manifest_path(prefix)
    try:
        data = read_bytes(path, MOST_BYTES)
        _check_format(data, path)
        return _checked(data, path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"data: {path} cannot be read: {error.strerror}.") from None
    except InputError as error:
        raise UserError(
            f"data: {path} is not a shard's manifest: {error.problem} Copy or tokenise the shard again, or remove this "
            "file to use the shard unchecked."
        ) from None


def _check_format(data: bytes, path: Path) -> None:
    """Raises UserError for a later one, of which nothing else is known. Ours stands at the beginning."""
    if not data.startswith(f'{{\n "format": {FORMAT},'.encode()):
        written = parse_json(data, _Format, path).format
        if written > FORMAT:
            raise UserError(f"data: {path} has format {written}; this program reads up to {FORMAT}. Update it.")


def is_manifest(path: Path) -> bool:
    """Whether a file is a shard's manifest, of any format, whatever its name. What does not begin like one is not read
    on: it may be large. False where it cannot be read.
    """
    try:
        with open_regular(path) as file:
            if file.read(len(BEGINNING)) != BEGINNING:
                return False
        return "files" in parse_json(read_bytes(path, MOST_BYTES), dict, path)
    except (OSError, InputError):
        return False


def _checked(data: bytes, path: Path) -> ShardManifest:
    """Raises InputError where a field is missing, of another kind or not known: one flipped bit does that."""
    found: ShardManifest = parse_json(
        data, ShardManifest, path, lambda name, _: f"{name}: not known in format {FORMAT}."
    )
    if found.files and set(found.files) != {"bin", "idx"}:
        raise InputError(path, f"files are {', '.join(found.files)}, expected bin and idx.")
    return found


def damaged_blocks(path: Path, expected: FileSum, report: Callable[[int], object]) -> Iterator[str]:
    """Read a file and describe what differs from its checksums, range by range. report: gets the bytes read.

    Raises OSError where it cannot be read.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != expected.size:
            yield f"{path}: {size} bytes, the manifest says {expected.size}"
        if _digest("".join(expected.blocks).encode()) != expected.blake2b:
            yield f"{path}: the checksums of its blocks are not those that the manifest sums up"
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        buffered = io.BufferedReader(file)  # reads all of a block, where it is there
        for number, digest in enumerate(expected.blocks):
            block = buffered.read(BLOCK_BYTES)
            report(len(block))
            if _digest(block) != digest:
                start = number * BLOCK_BYTES
                yield f"{path}: bytes {start} to {min(start + BLOCK_BYTES, expected.size)} are not what was written"


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
