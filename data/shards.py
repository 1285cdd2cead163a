"""Token shards: `.bin` (ids) and `.idx` (lengths) files, byte for byte those of Megatron's IndexedDataset.

Layout of `.idx`, little-endian, as megatron-core 0.19.2 (`core/datasets/indexed_dataset.py`) defines it:
9 bytes magic, uint64 version 1, uint8 dtype code, uint64 sequences, uint64 document entries,
int32 length of every sequence [tokens], int64 offset of every sequence [bytes in `.bin`],
int64 document entries (entry d = first sequence of document d; the last = number of sequences),
and for multimodal data one int8 mode a sequence, which we accept and ignore.
"""

import hashlib
import os
import secrets
import struct
from array import array
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

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
    the size that the `.idx` promises.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        for path in (idx_path(prefix), bin_path(prefix)):
            if not path.is_file():
                raise UserError(f"data: {path} is missing; a shard is a pair of .bin and .idx files.")
        self.dtype, self.sequence_count, self._document_entries = _read_header(idx_path(prefix))
        self.token_count = self._checked_token_count()
        self.document_count = self._checked_document_count()
        self._tokens: np.ndarray | None = None

    @property
    def tokens(self) -> np.ndarray:
        """All ids, [token_count] of `dtype`, read from disk as they are touched."""
        if self._tokens is None:
            self._tokens = np.memmap(bin_path(self.prefix), self.dtype, mode="r")
        return self._tokens

    def document_start(self, document: int) -> int:
        """Position in `tokens` of a document's first token; `document_count` gives `token_count`. O(1)."""
        sequence = self._document_entry(document)
        return self.token_count if sequence == self.sequence_count else self._sequence_start(sequence)

    def fingerprint(self) -> str:
        """Hex digest of the header, the sizes and the first and last 64 KiB of both files: O(1), so a change
        in the middle of a file that keeps its length is not seen.
        """
        digest = hashlib.blake2b(digest_size=16)
        for path in (idx_path(self.prefix), bin_path(self.prefix)):
            size = path.stat().st_size
            digest.update(size.to_bytes(8, "little"))
            with path.open("rb") as file:
                digest.update(file.read(FINGERPRINT_BYTES))
                file.seek(max(0, size - FINGERPRINT_BYTES))
                digest.update(file.read(FINGERPRINT_BYTES))
        return digest.hexdigest()

    def _checked_token_count(self) -> int:
        index, tokens = idx_path(self.prefix), bin_path(self.prefix)
        promised = HEADER.size + 12 * self.sequence_count + 8 * self._document_entries
        found = index.stat().st_size
        if found not in (promised, promised + self.sequence_count):
            raise UserError(
                f"data: {index} has {found} bytes where its header promises {promised}: truncated or "
                "damaged. Copy or tokenise it again."
            )
        expected, actual = self._promised_bin_bytes(), tokens.stat().st_size
        if expected != actual:
            raise UserError(
                f"data: {tokens} has {actual} bytes where {index.name} promises {expected}: truncated, or of "
                "another tokenisation. Copy or tokenise it again."
            )
        if actual == 0:
            raise UserError(f"data: {tokens} is an empty corpus: it holds no token.")
        return actual // self.dtype.itemsize

    def _checked_document_count(self) -> int:
        """Documents by the index; an index that marks none makes every sequence a document."""
        if self._document_entries <= 1:
            self._document_entries = 0
            return self.sequence_count
        last = self._document_entry(self._document_entries - 1)
        if last != self.sequence_count:
            raise UserError(
                f"data: {idx_path(self.prefix)} ends its documents at sequence {last} and holds "
                f"{self.sequence_count} sequences: damaged. Copy or tokenise it again."
            )
        return self._document_entries - 1

    def _promised_bin_bytes(self) -> int:
        if self.sequence_count == 0:
            return 0
        last = self.sequence_count - 1
        length = int(self._index_value(np.int32, HEADER.size + 4 * last))
        start = int(self._index_value(np.int64, HEADER.size + 4 * self.sequence_count + 8 * last))
        return start + length * self.dtype.itemsize

    def _sequence_start(self, sequence: int) -> int:
        offset = HEADER.size + 4 * self.sequence_count + 8 * sequence
        return int(self._index_value(np.int64, offset)) // self.dtype.itemsize

    def _document_entry(self, document: int) -> int:
        if not self._document_entries:
            return document
        return int(self._index_value(np.int64, HEADER.size + 12 * self.sequence_count + 8 * document))

    def _index_value(self, dtype: type[np.signedinteger], offset: int) -> np.signedinteger:
        """One number of the index. Read when asked: a billion documents need no array in memory."""
        with idx_path(self.prefix).open("rb") as file:
            file.seek(offset)
            return np.frombuffer(file.read(np.dtype(dtype).itemsize), dtype)[0]


def _read_header(path: Path) -> tuple[np.dtype, int, int]:
    """(dtype, sequences, document entries) of an index file."""
    with path.open("rb") as file:
        raw = file.read(HEADER.size)
    if len(raw) < HEADER.size or not raw.startswith(MAGIC):
        raise UserError(f"data: {path} is not a Megatron index: it begins with {raw[:9]!r}, expected {MAGIC!r}.")
    _, version, code, sequences, document_entries = HEADER.unpack(raw)
    if version != VERSION:
        raise UserError(f"data: {path} is of index version {version}; this program reads version {VERSION}.")
    if code not in DTYPES:
        known = ", ".join(f"{key} = {np.dtype(value).name}" for key, value in DTYPES.items())
        raise UserError(f"data: {path} says dtype code {code}, which is no integer type; known: {known}.")
    return np.dtype(DTYPES[code]), sequences, document_entries


class ShardWriter:
    """Writes one shard, document by document; the pair appears under its name only when it is complete.

    Use it as a context: leaving it normally puts both files on disk and renames them (`.idx` last, so an
    `.idx` means a whole pair); leaving it by an exception removes what was written.
    """

    def __init__(self, prefix: Path, vocab_size: int) -> None:
        self.prefix = prefix
        self.vocab_size = vocab_size
        self.dtype = token_dtype(vocab_size)
        self.token_count = 0
        self._lengths = array("i")
        self._open_document_tokens = 0
        suffix = f".tmp-{os.getpid()}-{secrets.token_hex(4)}"
        pair = bin_path(prefix), idx_path(prefix)
        self._parts = {path: path.with_name(path.name + suffix) for path in pair}

    @property
    def document_count(self) -> int:
        """Documents written so far, the open one not counted."""
        return len(self._lengths)

    @property
    def open_document_tokens(self) -> int:
        """Tokens of the document that has not ended yet."""
        return self._open_document_tokens

    def add(self, ids: np.ndarray) -> None:
        """Append ids [n] to the open document. Raises ValueError for an id outside the vocabulary."""
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= self.vocab_size):
            raise ValueError(f"token ids {ids.min()}..{ids.max()} for a vocabulary of {self.vocab_size}")
        self._file.write(np.ascontiguousarray(ids, self.dtype).data)
        self._open_document_tokens += ids.size

    def end_document(self) -> None:
        """Close the open document. Raises UserError beyond the 2^31 - 1 tokens that the format can count."""
        if self._open_document_tokens > MAX_SEQUENCE_TOKENS:
            raise UserError(
                f"data: a document of {self._open_document_tokens} tokens does not fit the .idx format "
                f"(at most {MAX_SEQUENCE_TOKENS}); split the file."
            )
        self._lengths.append(self._open_document_tokens)
        self.token_count += self._open_document_tokens
        self._open_document_tokens = 0

    def __enter__(self) -> Self:
        self._file = self._parts[bin_path(self.prefix)].open("wb", buffering=1 << 20)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._commit()
        finally:
            self._file.close()
            for part in self._parts.values():
                part.unlink(missing_ok=True)

    def _commit(self) -> None:
        if self._open_document_tokens:
            raise ValueError("the last document was not ended")
        self._file.flush()
        os.fsync(self._file.fileno())
        write_index(self._parts[idx_path(self.prefix)], np.frombuffer(self._lengths, np.int32), self.dtype)
        for path, part in self._parts.items():
            part.replace(path)


def write_index(path: Path, lengths: np.ndarray, dtype: np.dtype) -> None:
    """Write the `.idx` of documents of one sequence each and put it on disk.

    lengths: [documents] int32, in tokens. Whole arrays at a time: a loop over ten million lengths costs
    fourteen times as much.
    """
    code = next(key for key, value in DTYPES.items() if value is dtype.type)
    offsets = np.zeros(len(lengths), np.int64)
    np.cumsum(lengths[:-1], out=offsets[1:], dtype=np.int64)
    offsets *= dtype.itemsize
    with path.open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(lengths) + 1))
        file.write(np.ascontiguousarray(lengths, np.int32).data)
        file.write(offsets.data)
        file.write(np.arange(len(lengths) + 1, dtype=np.int64).data)
        file.flush()
        os.fsync(file.fileno())
