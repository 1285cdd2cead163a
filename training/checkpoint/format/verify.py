"""Whether the files of a checkpoint are what was written: sizes, or every byte. No torch here."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import xxhash

from training.checkpoint.format.manifest import MANIFEST, DamagedError, Manifest, facts_of, read_manifest
from training.checkpoint.format.pieces import Group, read_piece
from training.checkpoint.format.tables import FileFacts
from training.checkpoint.format.writer import DATA, LENGTH_BYTES

STEP_BYTES, AHEAD_BYTES = 1 << 20, 32 << 20
"""Read and hashed in one go, so that it is still in the processor's cache; and what the disk is asked for ahead."""
Depth = Literal["hashes", "sizes"]


class Damage(NamedTuple):
    """One file that is not what was written."""

    file: str
    text: str
    """What was expected and what is there; the tensors, where they are known."""


def damages(folder: Path, depth: Depth, share: tuple[int, int] = (0, 1)) -> list[Damage]:
    """Everything that is wrong with ``folder``, in a fixed order; empty when it is good.

    depth: "sizes" spares the files of tensors, of which it looks at sizes alone. The others are small, and a changed
    byte in them would make ranks read elsewhere, or some of them fail and others wait.
    share: (k, n) looks at every n-th file from the k-th on, so that n processes look at each once. The manifest and
    the names are everybody's. Nothing is changed, and nothing of the tensors is kept.
    """
    try:
        manifest = read_manifest(folder)
    except DamagedError as error:
        return [Damage(MANIFEST, str(error))]
    found = list(_names(folder, manifest))
    part, parts = share
    for name in _by_size(manifest)[part::parts]:
        found += _file(folder, name, manifest, depth)
    return found


def _names(folder: Path, manifest: Manifest) -> Iterator[Damage]:
    there = {entry.name for entry in folder.iterdir()}
    for name in sorted(there - manifest.files.keys() - {MANIFEST}):
        yield Damage(name, f"{folder / name}: not in the manifest; nothing was written under this name")


def _by_size(manifest: Manifest) -> Sequence[str]:
    """The largest first, so that shares are even."""
    return sorted(manifest.files, key=lambda name: (-manifest.files[name].bytes, name))


def _file(folder: Path, name: str, manifest: Manifest, depth: Depth) -> list[Damage]:
    path, expected = folder / name, manifest.files[name]
    try:
        size = path.stat().st_size
        if size != expected.bytes:
            return [Damage(name, f"{path}: expected {expected.bytes:,} bytes, found {size:,}")]
        if name.endswith(DATA):
            return _tensors(path, expected) if depth == "hashes" else []
        found = facts_of(path)
    except OSError as error:
        return [Damage(name, f"{path}: {error.strerror or error}")]
    if found == expected:
        return []
    return [Damage(name, f"{path}: expected hash {expected.hash}, found {found.hash}")]


def _tensors(path: Path, expected: FileFacts) -> list[Damage]:
    """A file of tensors, read once: the table at its end has the manifest's hash, and each piece the table's.

    A step's bytes are hashed while the disk fetches those of the next.
    """
    with path.open("rb", buffering=0) as file:
        file.seek(expected.bytes - LENGTH_BYTES)
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        start = max(0, expected.bytes - LENGTH_BYTES - length)
        file.seek(start)
        table = file.read(min(length, expected.bytes))
        if (
            found := xxhash.xxh3_128(table).hexdigest()
        ) != expected.hash or start + length + LENGTH_BYTES != expected.bytes:
            text = f"{path}: expected hash {expected.hash} of the table at its end, found {found}"
            return [Damage(path.name, text)]
        try:
            pieces = list(_hashed(json.loads(table)))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            return [Damage(path.name, f"{path}: its end is not the table of its pieces ({error!r})")]
        buffer = memoryview(bytearray(STEP_BYTES))
        changed = []
        for key, position, size, wanted in pieces:
            found = hash_of(file.fileno(), position, size, buffer)
            if found != wanted:
                changed.append((key, wanted, found))
    if not changed:
        return []
    keys = list(dict.fromkeys(key for key, _, _ in changed))
    shown = ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
    _, wanted, found = changed[0]
    return [Damage(path.name, f"{path}: expected hash {wanted}, found {found} (in {shown})")]


def _hashed(table: Any) -> Iterator[tuple[str, int, int, str]]:
    """(key, position, bytes, hash) of every piece of every tensor, in the order of the file."""
    found = []
    for entry in table["groups"]:
        group = Group(tuple(entry["keys"]), entry["dtype"], tuple(entry["shape"]))
        for piece in map(read_piece, entry["pieces"]):
            size = group.piece_bytes(piece.shape)
            for number, (key, wanted) in enumerate(zip(group.keys, piece.hashes, strict=True)):
                found.append((key, piece.position + number * size, size, wanted))
    yield from sorted(found, key=lambda part: part[1])


def hash_of(descriptor: int, position: int, size: int, buffer: memoryview) -> str:
    """xxh3_64 of a stretch of a file, read through ``buffer``; of what there is, where the file is shorter."""
    digest, end = xxhash.xxh3_64(), position + size
    while position < end:
        os.posix_fadvise(descriptor, position + STEP_BYTES, AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
        count = os.preadv(descriptor, [buffer[: min(STEP_BYTES, end - position)]], position)
        if not count:
            break  # shorter than a moment ago
        digest.update(buffer[:count])
        position += count
    return digest.hexdigest()
