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
from functools import cached_property
from pathlib import Path
from typing import NoReturn

import numpy as np

from data import bucket_copies
from data.block_cache import BlockCache, BlockTokens
from data.manifest import END_BYTES, ShardManifest, manifest_path, read_manifest
from data.raw.identity import ends_digest
from program.errors import UserError
from program.untrusted import InputError, open_regular

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
MAX_SEQUENCE_TOKENS = 2**31 - 1
FINGERPRINT_BYTES = 1 << 16
STRETCH = 1 << 20
"""Sequences of an index that are checked at once, in a few tens of MB of memory."""


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
    the size that the `.idx` promises, or either not what the manifest (data/manifest.py) says, with which of their
    bytes they begin and end too. Of the arrays of the index only the ends are checked; what lies between is checked
    against its neighbours where it is read.
    """

    def __init__(self, prefix: Path, check_ends: bool = True, blocks: BlockCache | None = None) -> None:
        """blocks: what is read through where the files stand for objects in a bucket."""
        self.prefix = prefix
        self.cache = blocks if blocks is not None and prefix.is_relative_to(blocks.copies) else None
        self.manifest: ShardManifest | None = None
        try:
            with _opened(idx_path(prefix)) as index, _opened(bin_path(prefix)) as tokens:
                self._opened = _facts(os.fstat(index)), _facts(os.fstat(tokens))
                self._read_index(index, os.fstat(tokens).st_size)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise UserError(f"data: {error.filename} is missing; a shard is a pair of .bin and .idx files.") from None
        except InputError as error:
            raise UserError(f"data: {error}") from None
        except OSError as error:
            raise UserError(f"data: {error.filename or prefix} cannot be read: {error.strerror}.") from None
        self._stands_for = None if self.cache is None else bucket_copies.stands_for(bin_path(prefix))
        if (manifest := read_manifest(prefix)) is not None:
            self.manifest = manifest.without_blocks()
            self._check_manifest(self.manifest)
            if check_ends:
                self._check_ends(self.manifest)

    def changes(self) -> Iterator[str]:
        """What has happened to its files since they were opened, a sentence's beginning for each."""
        for path, before in zip((idx_path(self.prefix), bin_path(self.prefix)), self._opened, strict=True):
            try:
                now = path.stat()
            except OSError as error:
                yield f"{path} cannot be found any more ({error.strerror})"
                continue
            size, *_ = FACTS.unpack(before)
            if now.st_size != size:
                yield f"{path} has changed from {size:,} to {now.st_size:,} bytes"
            elif _facts(now) != before:
                yield f"{path} was written to, or replaced,"

    @cached_property
    def tokens(self) -> np.ndarray | BlockTokens:
        """All ids, [token_count] of `dtype`, read from disk or bucket as they are touched, by slices."""
        if self.cache is not None and self._stands_for is not None:
            return BlockTokens(self.cache, self._stands_for, self.dtype)
        bucket_copies.check_is_no_hole(bin_path(self.prefix))
        with open_regular(bin_path(self.prefix)) as file:
            if os.fstat(file.fileno()).st_size < self.token_count * self.dtype.itemsize:
                raise UserError(f"data: {bin_path(self.prefix)} became shorter after it was opened. Copy it again.")
            mapped = np.memmap(file, self.dtype, mode="r", shape=(self.token_count,))
        return mapped.view(np.ndarray)  # slices of a memmap cost several times as much

    @cached_property
    def array(self) -> np.ndarray:
        """The same as an array; of a shard in a bucket, only what `BlockTokens.have` gives may be read."""
        return self.tokens.array if isinstance(self.tokens, BlockTokens) else self.tokens

    def document_start(self, document: int) -> int:
        """Position in `tokens` of a document's first token; `document_count` gives `token_count`. O(1).

        Raises UserError where the entries of the index that it follows from do not agree with their neighbours.
        """
        if document == self.document_count:
            return self.token_count
        if document == 0:
            return 0
        with _opened(idx_path(self.prefix)) as index:
            sequence = self._document_entry(index, document)
            return self.token_count if sequence == self.sequence_count else self._sequence_start(index, sequence)

    def document_lengths(self) -> np.ndarray:
        """Tokens of every document, [document_count] int64. Reads all lengths and document entries.

        Raises UserError where they cannot be those of this `.bin`.
        """
        lengths = self._array(np.int32, HEADER.size, 0, self.sequence_count)
        total = int(lengths.sum(dtype=np.int64))
        if lengths.min() < 0 or total != self.token_count:
            self._refuse(f"lengths of at least {lengths.min()} tokens, {total} together", f"0, {self.token_count}")
        if not self._document_entries:
            return lengths.astype(np.int64)
        starts = self._array(np.int64, self._documents_at, 0, self._document_entries)
        self._check_documents(starts, 0)
        ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        return np.diff(ends[starts])

    def check_index(self) -> None:
        """Read the whole index, for those who follow it without looking at neighbours.

        Raises UserError naming the first sequence that does not begin where the one before it ends, or the first
        documents that cannot be right.
        """
        end, width = 0, self.dtype.itemsize
        for first in range(0, self.sequence_count, STRETCH):
            count = min(STRETCH, self.sequence_count - first)
            lengths = self._array(np.int32, HEADER.size, first, count).astype(np.int64)
            offsets = self._array(np.int64, self._offsets_at, first, count)
            ends = end + np.cumsum(lengths) * width
            starts = ends - lengths * width
            wrong = (offsets != starts) | (lengths < 0)
            if wrong.any():
                place = int(np.argmax(wrong))
                self._refuse(
                    f"sequence {first + place} of {lengths[place]} tokens at byte {offsets[place]} of the .bin",
                    f"byte {starts[place]}, where the one before it ends, and 0 or more tokens",
                )
            end = int(ends[-1])
        for first in range(0, self._document_entries, STRETCH):
            before = max(first - 1, 0)
            count = min(STRETCH + 1, self._document_entries - before)
            self._check_documents(self._array(np.int64, self._documents_at, before, count), before)

    def _array(self, dtype: type[np.integer], start: int, first: int, count: int) -> np.ndarray:
        """Entries `first` to `first` + `count` of what begins at byte `start` of the index."""
        with _opened(idx_path(self.prefix)) as index:
            return self._numbers(index, dtype, start + first * np.dtype(dtype).itemsize, count)

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
            with _opened(path) as file:
                size = os.fstat(file).st_size
                digest.update(size.to_bytes(8, "little"))
                digest.update(os.pread(file, FINGERPRINT_BYTES, 0))
                digest.update(os.pread(file, FINGERPRINT_BYTES, max(0, size - FINGERPRINT_BYTES)))
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
        for sequence in (0, self.sequence_count - 1):
            self._sequence_start(index, sequence)
        self.document_count = self._checked_document_count(index)

    def _check_manifest(self, manifest: ShardManifest) -> None:
        """The sizes and the kind of the files against what was written about them."""
        sizes = {"bin": self.token_count * self.dtype.itemsize, "idx": self._index_bytes}
        said = {"dtype": manifest.dtype, "tokens": manifest.tokens, "documents": manifest.documents}
        said["sequences"] = manifest.documents  # our documents are one sequence each
        said |= {f"bytes of .{name}": one.size for name, one in manifest.files.items()}
        found = {"dtype": self.dtype.name, "tokens": self.token_count, "documents": self.document_count}
        found["sequences"] = self.sequence_count
        found |= {f"bytes of .{name}": sizes[name] for name in manifest.files}
        wrong = [f"{key} {found[key]}, expected {str(said[key])[:40]}" for key in said if said[key] != found[key]]
        if not manifest.files:
            wrong.append("it describes none")
        if wrong:
            raise UserError(
                f"data: {self.prefix}.bin/.idx are not the files that {manifest_path(self.prefix).name} describes: "
                f"{'; '.join(wrong)}. Copy the three again, or tokenise again."
            )

    def _check_ends(self, manifest: ShardManifest) -> None:
        """O(1), and enough to see a file that was overwritten as a whole, filled with holes after a power cut, or is
        another one's."""
        for name, path in (("bin", bin_path(self.prefix)), ("idx", idx_path(self.prefix))):
            expected = manifest.files[name].ends if name in manifest.files else ""
            with _opened(path) as file:
                found = ends_digest(file, os.fstat(file).st_size, END_BYTES)
            if expected and found != expected:
                raise UserError(
                    f"data: {path} is not the file that {manifest_path(self.prefix).name} describes: its first or last "
                    f"{END_BYTES} bytes are others, and its size is right. `python -m tools.preprocess verify "
                    f"{self.prefix}` names all damage. Copy the three again, or tokenise again."
                )

    def _checked_document_count(self, index: int) -> int:
        """Documents by the index; an index that marks none makes every sequence a document."""
        if self._document_entries <= 1:
            self._document_entries = 0
            return self.sequence_count
        (last,) = self._numbers(index, np.int64, self._documents_at + 8 * (self._document_entries - 1), 1).tolist()
        if last != self.sequence_count:
            raise UserError(
                f"data: {idx_path(self.prefix)} ends its documents at sequence {last} and holds "
                f"{self.sequence_count} sequences: damaged. Copy or tokenise it again."
            )
        self._document_entry(index, 0)
        return self._document_entries - 1

    def _promised_bin_bytes(self, index: int) -> int:
        if self.sequence_count == 0:
            return 0
        last = self.sequence_count - 1
        (length,) = self._numbers(index, np.int32, HEADER.size + 4 * last, 1).tolist()
        (offset,) = self._numbers(index, np.int64, self._offsets_at + 8 * last, 1).tolist()
        return offset + length * self.dtype.itemsize

    @property
    def _offsets_at(self) -> int:
        return HEADER.size + 4 * self.sequence_count

    @property
    def _documents_at(self) -> int:
        return HEADER.size + 12 * self.sequence_count

    def _sequence_start(self, index: int, sequence: int) -> int:
        """Position of a sequence's first token: each sequence must begin where the one before it ends."""
        first, last = max(sequence - 1, 0), min(sequence + 1, self.sequence_count - 1)
        lengths = self._numbers(index, np.int32, HEADER.size + 4 * first, last - first + 1).tolist()
        offsets: list[int] = self._numbers(index, np.int64, self._offsets_at + 8 * first, last - first + 1).tolist()
        width, bin_bytes = self.dtype.itemsize, self.token_count * self.dtype.itemsize
        ends = [offset + length * width for offset, length in zip(offsets, lengths, strict=True)]
        # What follows: the next offset; after the last sequence, the end of the .bin.
        starts = [*([0] if first == 0 else offsets[:1]), *ends[:-1]]
        if last == self.sequence_count - 1:
            offsets.append(bin_bytes)
            starts.append(ends[-1])
        outside = [one for one in offsets if one % width or not 0 <= one <= bin_bytes]
        if outside or min(lengths) < 0 or offsets != starts:
            self._refuse(
                f"sequences {first} to {last} of {lengths} tokens, which begin at bytes {offsets}",
                f"multiples of {width} up to {bin_bytes}, here {starts} by the lengths",
            )
        return offsets[sequence - first] // width

    def _document_entry(self, index: int, document: int) -> int:
        """First sequence of a document. Read when asked: a billion documents need no array in memory."""
        if not self._document_entries:
            return document
        first, last = max(document - 1, 0), min(document + 1, self._document_entries - 1)
        entries = self._numbers(index, np.int64, self._documents_at + 8 * first, last - first + 1)
        # As many documents as sequences are one each, in all but the index that has an empty one for each that has
        # two. So there, between two entries that say so, is no other.
        one_each = self._document_entries == self.sequence_count + 1 and (entries[0], entries[-1]) == (first, last)
        self._check_documents(entries, first, one_each)
        return int(entries[document - first])

    def _check_documents(self, entries: np.ndarray, first: int, one_each: bool = False) -> None:
        """Raise UserError where document entries, the first of which is number `first`, cannot be right.

        A manifest says that the shard is ours: one sequence each. Documents of several sequences or none leave room
        for an entry that is wrong and lies between its neighbours: only a checksum could tell.
        """
        if one_each or self.manifest is not None:
            wrong, rule = entries != np.arange(first, first + len(entries)), "each its own number"
        else:
            rule = f"from 0, none below the one before it, up to {self.sequence_count}"
            wrong = (entries < 0) | (entries > self.sequence_count)
            wrong[1:] |= entries[1:] < entries[:-1]
            wrong[0] |= first == 0 and entries[0] != 0
        if wrong.any():
            place = max(int(np.argmax(wrong)) - 1, 0)
            shown = entries[place : place + 3].tolist()
            self._refuse(f"documents {first + place} to {first + place + len(shown) - 1} at sequences {shown}", rule)

    def _numbers(self, index: int, dtype: type[np.integer], start: int, count: int) -> np.ndarray:
        """Little-endian integers of an index file from byte `start` on."""
        found, filled = bytearray(count * np.dtype(dtype).itemsize), 0
        while filled < len(found):
            size = os.preadv(index, [memoryview(found)[filled:]], start + filled)
            if not size:  # became shorter after it was opened
                self._refuse(f"no byte after {start + filled}", f"{len(found)} bytes at {start}")
            filled += size
        return np.frombuffer(found, dtype)

    def _refuse(self, found: str, expected: str) -> NoReturn:
        verify = f"`python -m tools.preprocess verify {self.prefix}` names all damage. " if self.manifest else ""
        raise UserError(
            f"data: {idx_path(self.prefix)} has {found}, expected {expected}: damaged. {verify}"
            "Copy or tokenise it again."
        )


FACTS = struct.Struct("<3Q")
"""What tells a file that was changed or replaced: size, nanosecond of its last change, number. As bytes: a run may have
ten thousands of shards, and each rank that reads holds them all."""


def _facts(found: os.stat_result) -> bytes:
    return FACTS.pack(found.st_size, found.st_mtime_ns, found.st_ino)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    with open_regular(path) as file:
        yield file.fileno()


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
