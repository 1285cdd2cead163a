"""Writing a token shard (data/shards.py): document by document, visible only when it is whole."""

import os
import secrets
from array import array
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from data.manifest import BlockSums, FileSum, ShardManifest, manifest_path
from data.shards import DTYPES, HEADER, MAGIC, MAX_SEQUENCE_TOKENS, VERSION, bin_path, idx_path, token_dtype
from program.errors import UserError

Describe = Callable[["ShardWriter", dict[str, FileSum]], ShardManifest]
"""Makes the manifest of a shard whose documents have all been added, from its checksums."""


class ShardWriter:
    """Writes one shard, document by document; it appears under its name only when it is complete.

    Use it as a context: leaving it normally puts the files on disk and renames them (`.idx` last, so an
    `.idx` means a whole shard); leaving it by an exception removes what was written.
    """

    def __init__(self, prefix: Path, vocab_size: int, describe: Describe | None = None) -> None:
        """describe: makes the manifest; None: a shard without one, as Megatron's."""
        self.prefix = prefix
        self.vocab_size = vocab_size
        self.dtype = token_dtype(vocab_size)
        self.token_count = 0
        self._describe = describe
        self._sums = BlockSums()
        self._lengths = array("i")
        self.open_document_tokens = 0
        """Of the document that has not ended yet."""
        suffix = f".tmp-{os.getpid()}-{secrets.token_hex(4)}"
        names = [bin_path(prefix), *([manifest_path(prefix)] if describe else []), idx_path(prefix)]
        self._parts = {path: path.with_name(path.name + suffix) for path in names}

    @property
    def document_count(self) -> int:
        """Documents written so far, the open one not counted."""
        return len(self._lengths)

    def add(self, ids: np.ndarray) -> None:
        """Append ids [n] to the open document. Raises ValueError for an id outside the vocabulary."""
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= self.vocab_size):
            raise ValueError(f"token ids {ids.min()}..{ids.max()} for a vocabulary of {self.vocab_size}")
        data = memoryview(np.ascontiguousarray(ids, self.dtype)).cast("B")
        self._file.write(data)
        if self._describe:
            self._sums.update(data)
        self.open_document_tokens += ids.size

    def end_document(self) -> None:
        """Close the open document. Raises UserError beyond the 2^31 - 1 tokens that the format can count."""
        self.end_documents(np.array([self.open_document_tokens]))

    def add_documents(self, ids: np.ndarray, lengths: np.ndarray) -> None:
        """Append whole documents: ids [n] one document after another, lengths [documents] in tokens.

        Raises as `add` and `end_document` do.
        """
        self.add(ids)
        self.end_documents(lengths)

    def end_documents(self, lengths: np.ndarray) -> None:
        """Say that what was added since the last document's end are documents of these lengths."""
        if int(lengths.sum()) != self.open_document_tokens:
            raise ValueError(f"documents of {lengths.sum()} tokens, {self.open_document_tokens} were added")
        self.open_document_tokens = 0
        if len(lengths) and int(lengths.max()) > MAX_SEQUENCE_TOKENS:
            raise UserError(
                f"data: a document of {lengths.max()} tokens does not fit the .idx format "
                f"(at most {MAX_SEQUENCE_TOKENS}); split the file."
            )
        self._lengths.frombytes(lengths.astype(np.int32).tobytes())
        self.token_count += int(lengths.sum())

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
            try:
                self._file.close()
            except OSError:  # what was not flushed to a full disk fails again, and is removed
                if kind is None:
                    raise
            finally:
                for part in self._parts.values():
                    part.unlink(missing_ok=True)

    def _commit(self) -> None:
        if self.open_document_tokens:
            raise ValueError("the last document was not ended")
        self._file.flush()
        os.fsync(self._file.fileno())
        lengths = np.frombuffer(self._lengths, np.int32)
        index_sum = write_index(self._parts[idx_path(self.prefix)], lengths, self.dtype)
        if self._describe:
            manifest = self._describe(self, {"bin": self._sums.result(), "idx": index_sum})
            _write(self._parts[manifest_path(self.prefix)], [manifest.dump().encode()])
        for path, part in self._parts.items():
            part.replace(path)


def write_index(path: Path, lengths: np.ndarray, dtype: np.dtype) -> FileSum:
    """Write the `.idx` of documents of one sequence each and put it on disk: its checksums.

    lengths: [documents] int32, in tokens. Whole arrays at a time: a loop over ten million lengths costs
    fourteen times as much.
    """
    code = next(key for key, value in DTYPES.items() if value is dtype.type)
    offsets = np.zeros(len(lengths), np.int64)
    np.cumsum(lengths[:-1], out=offsets[1:], dtype=np.int64)
    offsets *= dtype.itemsize
    header = HEADER.pack(MAGIC, VERSION, code, len(lengths), len(lengths) + 1)
    documents = np.arange(len(lengths) + 1, dtype=np.int64)
    arrays = (np.ascontiguousarray(lengths, np.int32), offsets, documents)
    pieces = [memoryview(header), *(memoryview(array).cast("B") for array in arrays if array.size)]
    _write(path, pieces)
    sums = BlockSums()
    for piece in pieces:
        sums.update(piece)
    return sums.result()


def _write(path: Path, pieces: list[memoryview] | list[bytes]) -> None:
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
