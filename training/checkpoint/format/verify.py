"""Whether the files of a checkpoint are what was written: sizes, or every byte."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import xxhash

from program.untrusted import InputError, json_value, open_regular
from training.checkpoint.format.coverage import covered_once
from training.checkpoint.format.index import CheckpointIndex
from training.checkpoint.format.manifest import MANIFEST, CheckpointManifest, DamagedError, facts_of, read_manifest
from training.checkpoint.format.pieces import read_group, read_piece
from training.checkpoint.format.tables import INDEX, FileFacts
from training.checkpoint.format.writer import DATA, LENGTH_BYTES

STEP_BYTES, AHEAD_BYTES = 1 << 20, 32 << 20
"""Read and hashed in one go, so that it is still in the processor's cache; and what the disk is asked for ahead."""
Depth = Literal["hashes", "sizes"]


class Damage(NamedTuple):
    """One file that is not what was written."""

    file: str
    text: str
    """What was expected and what is there; the tensors, where they are known."""
    is_content: bool = True
    """Of what lies there; else the system refused to read it, which may pass."""


def damages(folder: Path, depth: Depth, share: tuple[int, int] = (0, 1)) -> list[Damage]:
    """Everything that is wrong with ``folder``, in a fixed order; empty when it is good.

    Files that the manifest does not know are no damage, see ``strangers``.

    depth: "sizes" spares the files of tensors, of which it checks sizes alone. The others are small, and a changed
    byte in them would make ranks read elsewhere, or some of them fail and others wait.
    share: (k, n) checks every n-th file from the k-th on, so that n processes check each once. The manifest and
    the names are checked by all. Nothing is changed, and nothing of the tensors is kept.
    """
    try:
        manifest = read_manifest(folder)
    except DamagedError as error:
        return [Damage(MANIFEST, str(error), not error.by_system)]
    found = []
    for name in share_of(manifest, share):
        found += _file(folder, name, manifest, depth)
    if not found and INDEX in manifest.files:
        found += _index(folder, manifest, share)
    return found


def strangers(folder: Path) -> list[str]:
    """Names in ``folder`` that its manifest does not know: an editor's, a file manager's, NFS' own, notes.

    They are no damage, for nothing is read by them. Raises DamagedError where there is no manifest, OSError.
    """
    known = {*read_manifest(folder).files, MANIFEST}
    return sorted(entry.name for entry in folder.iterdir() if entry.name not in known)


def _index(folder: Path, manifest: CheckpointManifest, share: tuple[int, int]) -> list[Damage]:
    """Whether each tensor of this share lies in the files, once and whole. Its hashes may be right and it may not, if
    a program wrote nonsense."""
    sizes = {name: facts.bytes for name, facts in manifest.files.items() if name.endswith(DATA)}
    part, parts = share
    try:
        with CheckpointIndex(folder) as index:
            for key in sorted(index.tensors)[part::parts]:
                if problem := _misplaced(index, key, sizes):
                    return [Damage(INDEX, f"{folder / INDEX}: {key}: {problem}")]
    except DamagedError as error:
        return [Damage(INDEX, str(error))]
    return []


def _misplaced(index: CheckpointIndex, key: str, sizes: Mapping[str, int]) -> str | None:
    info, pieces = index.tensors[key], index.pieces(key)
    if info.piece_bytes(info.shape) > sum(sizes.values()):
        return f"{list(info.shape)} {info.dtype} is more than all files hold"
    for piece in pieces:
        end = piece.position + (info.number + 1) * info.piece_bytes(piece.shape)
        if piece.file not in sizes or end > sizes[piece.file] or info.number >= len(piece.hashes):
            return f"a piece ends at byte {end:,} of {piece.file}, which has {sizes.get(piece.file, 0):,}"
    if not covered_once(info.shape, ((piece.offset, piece.shape) for piece in pieces)):
        return f"its {len(pieces)} pieces do not hold each element of {list(info.shape)} once"
    return None


def share_of(manifest: CheckpointManifest, share: tuple[int, int]) -> Sequence[str]:
    """Every n-th file from the k-th on, the largest first, so that shares are even."""
    part, parts = share
    return sorted(manifest.files, key=lambda name: (-manifest.files[name].bytes, name))[part::parts]


def _file(folder: Path, name: str, manifest: CheckpointManifest, depth: Depth) -> list[Damage]:
    path, expected = folder / name, manifest.files[name]
    try:
        size = path.stat().st_size
        if size != expected.bytes:
            return [Damage(name, f"{path}: expected {expected.bytes:,} bytes, found {size:,}")]
        if name.endswith(DATA):
            return _tensors(path, expected) if depth == "hashes" else []
        found = facts_of(path)
    except InputError as error:
        return [Damage(name, str(error))]
    except OSError as error:
        return [Damage(name, f"{path}: {error.strerror or error}", isinstance(error, FileNotFoundError))]
    if found == expected:
        return []
    return [Damage(name, f"{path}: expected hash {expected.hash}, found {found.hash}")]


def _tensors(path: Path, expected: FileFacts) -> list[Damage]:
    """A file of tensors, read once: the table at its end has the manifest's hash, and each piece the table's.

    A step's bytes are hashed while the disk fetches those of the next.
    """
    with open_regular(path) as file:
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
            pieces = list(_hashed(json_value(table, path)))
        except (InputError, ValueError, KeyError, TypeError, IndexError) as error:
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
        group = read_group(entry)
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
