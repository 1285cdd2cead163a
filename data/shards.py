"""Token shards: `.bin` (ids) and `.idx` (lengths) files, byte for byte those of Megatron's IndexedDataset.

Layout of `.idx`, little-endian, as megatron-core 0.19.2 (`core/datasets/indexed_dataset.py`) defines it:
9 bytes magic, uint64 version 1, uint8 dtype code, uint64 sequences, uint64 document entries,
int32 length of every sequence [tokens], int64 offset of every sequence [bytes in `.bin`],
int64 document entries (entry d = first sequence of document d; the last = number of sequences),
and for multimodal data one int8 mode a sequence, which we accept and ignore.
"""

import contextlib
import hashlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data.manifest import Manifest, manifest_path, read_manifest
from parallel.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
MAX_SEQUENCE_TOKENS = 2**31 - 1
FINGERPRINT_BYTES = 1 << 16


def bin_path(prefix: Path) -> Path:
    """`X` -> `X.bin`; a dot inside X is part of its name."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """`X` -> `X.idx`."""
    return prefix.with_name(prefix.name + ".idx")


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 below 65500 ids, else int32: Megatron's rule, which its readers rely on."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


class Shard:
    """One `.bin/.idx` pair, opened for reading: checked in O(1), memory-mapped on first use.

    Raises UserError where a file is missing, is not an index, holds no token, or where the `.bin` has not
    the size that the `.idx` promises, or either not what the manifest (data/manifest.py) says.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        try:
            with _opened(idx_path(prefix)) as index:
                bin_bytes = bin_path(prefix).stat().st_size
                self._read_index(index, bin_bytes)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise UserError(f"data: {error.filename} is missing; a shard is a pair of .bin and .idx files.") from None
        self.manifest = read_manifest(prefix)
        if self.manifest is not None:
            self._check_manifest(self.manifest)
        self._tokens: np.ndarray | None = None

    @property
    def tokens(self) -> np.ndarray:
        """All ids, [token_count] of `dtype`, read from disk as they are touched."""
        if self._tokens is None:
            mapped = np.memmap(bin_path(self.prefix), self.dtype, mode="r")
            self._tokens = mapped.view(np.ndarray)  # slices of a memmap cost several times as much
        return self._tokens

    def document_start(self, document: int) -> int:
        """Position in `tokens` of a document's first token; `document_count` gives `token_count`. O(1)."""
        if document == self.document_count:
            return self.token_count
        if document == 0:
            return 0
        with _opened(idx_path(self.prefix)) as index:
            sequence = self._document_entry(index, document)
            return self.token_count if sequence == self.sequence_count else self._sequence_start(index, sequence)

    def document_lengths(self) -> np.ndarray:
        """Tokens of every document, [document_count] int64. Reads the whole index."""
        lengths = np.fromfile(idx_path(self.prefix), np.int32, self.sequence_count, offset=HEADER.size)
        if not self._document_entries:
            return lengths.astype(np.int64)
        offset = HEADER.size + 12 * self.sequence_count
        starts = np.fromfile(idx_path(self.prefix), np.int64, self._document_entries, offset=offset)
        ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        return np.diff(ends[starts])

    def fingerprint(self) -> str:
        """Hex digest of the checksums that the manifest holds.

        Without a manifest: of the header, the sizes and the first and last 64 KiB of both files: O(1), so a
        change in the middle of a file that keeps its length is not seen.
        """
        digest = hashlib.blake2b(digest_size=16)
        if self.manifest is not None:
            for one in self.manifest.files.values():
                digest.update(one.blake2b.encode())
            return digest.hexdigest()
        for path in (idx_path(self.prefix), bin_path(self.prefix)):
            size = path.stat().st_size
            digest.update(size.to_bytes(8, "little"))
            with path.open("rb") as file:
                digest.update(file.read(FINGERPRINT_BYTES))
                file.seek(max(0, size - FINGERPRINT_BYTES))
                digest.update(file.read(FINGERPRINT_BYTES))
        return digest.hexdigest()

    def _read_index(self, index: int, bin_bytes: int) -> None:
        path = idx_path(self.prefix)
        self.dtype, self.sequence_count, self._document_entries = _read_header(path, index)
        self._index_bytes = os.fstat(index).st_size
        promised = HEADER.size + 12 * self.sequence_count + 8 * self._document_entries
        if self._index_bytes not in (promised, promised + self.sequence_count):
            raise UserError(
                f"data: {path} has {self._index_bytes} bytes where its header promises {promised}: truncated or "
                "damaged. Copy or tokenise it again."
            )
        expected = self._promised_bin_bytes(index)
        if expected != bin_bytes:
            raise UserError(
                f"data: {bin_path(self.prefix)} has {bin_bytes} bytes where {path.name} promises {expected}: "
                "truncated, or of another tokenisation. Copy or tokenise it again."
            )
        if bin_bytes == 0:
            raise UserError(f"data: {bin_path(self.prefix)} is an empty corpus: it holds no token.")
        self.token_count = bin_bytes // self.dtype.itemsize
        self.document_count = self._checked_document_count(index)

    def _check_manifest(self, manifest: Manifest) -> None:
        """The sizes and the kind of the files against what was written about them."""
        sizes = {"bin": self.token_count * self.dtype.itemsize, "idx": self._index_bytes}
        said = {"dtype": manifest.dtype, "tokens": manifest.tokens, "documents": manifest.documents}
        said |= {f"bytes of .{name}": one.size for name, one in manifest.files.items()}
        found = {"dtype": self.dtype.name, "tokens": self.token_count, "documents": self.document_count}
        found |= {f"bytes of .{name}": sizes[name] for name in manifest.files}
        wrong = [f"{key} {found[key]}, expected {said[key]}" for key in said if said[key] != found[key]]
        if wrong:
            raise UserError(
                f"data: {self.prefix}.bin/.idx are not the files that {manifest_path(self.prefix).name} describes: "
                f"{'; '.join(wrong)}. Copy the three again, or tokenise again."
            )

    def _checked_document_count(self, index: int) -> int:
        """Documents by the index; an index that marks none makes every sequence a document."""
        if self._document_entries <= 1:
            self._document_entries = 0
            return self.sequence_count
        last = self._document_entry(index, self._document_entries - 1)
        if last != self.sequence_count:
            raise UserError(
                f"data: {idx_path(self.prefix)} ends its documents at sequence {last} and holds "
                f"{self.sequence_count} sequences: damaged. Copy or tokenise it again."
            )
        return self._document_entries - 1

    def _promised_bin_bytes(self, index: int) -> int:
        if self.sequence_count == 0:
            return 0
        last = self.sequence_count - 1
        (length,) = struct.unpack("<i", os.pread(index, 4, HEADER.size + 4 * last))
        return (self._sequence_start(index, last) + length) * self.dtype.itemsize

    def _sequence_start(self, index: int, sequence: int) -> int:
        (offset,) = struct.unpack("<q", os.pread(index, 8, HEADER.size + 4 * self.sequence_count + 8 * sequence))
        return int(offset) // self.dtype.itemsize

    def _document_entry(self, index: int, document: int) -> int:
        """First sequence of a document. Read when asked: a billion documents need no array in memory."""
        if not self._document_entries:
            return document
        (entry,) = struct.unpack("<q", os.pread(index, 8, HEADER.size + 12 * self.sequence_count + 8 * document))
        return int(entry)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read_header(path: Path, index: int) -> tuple[np.dtype, int, int]:
    """(dtype, sequences, document entries) of an open index file."""
    raw = os.pread(index, HEADER.size, 0)
    if len(raw) < HEADER.size or not raw.startswith(MAGIC):
        raise UserError(f"data: {path} is not a Megatron index: it begins with {raw[:9]!r}, expected {MAGIC!r}.")
    _, version, code, sequences, document_entries = HEADER.unpack(raw)
    if version != VERSION:
        raise UserError(f"data: {path} is of index version {version}; this program reads version {VERSION}.")
    if code not in DTYPES:
        known = ", ".join(f"{key} = {np.dtype(value).name}" for key, value in DTYPES.items())
        raise UserError(f"data: {path} says dtype code {code}, which is no integer type; known: {known}.")
    return np.dtype(DTYPES[code]), sequences, document_entries
