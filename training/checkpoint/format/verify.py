"""Whether the files of a checkpoint are what was written: sizes, or every byte. No torch here."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import xxhash

from training.checkpoint.format.manifest import MANIFEST, DamagedError, Manifest, facts_of, read_manifest
from training.checkpoint.format.reader import Reader
from training.checkpoint.format.tables import INDEX, PIECES
from training.checkpoint.format.writer import DATA

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
        if depth == "sizes" and name.endswith(DATA):
            return []
        found = facts_of(path)
    except OSError as error:
        return [Damage(name, f"{path}: {error.strerror or error}")]
    if found == expected:
        return []
    where = _damaged_tensors(folder, name)
    return [Damage(name, f"{path}: expected hash {expected.hash}, found {found.hash}{where}")]


def _damaged_tensors(folder: Path, name: str) -> str:
    """Which tensors the changed bytes belong to, as far as the index can be read."""
    if name in (INDEX, PIECES):
        return ""
    try:
        reader = Reader(folder)
        keys = [key for key, info in reader.tensors.items() if _changed(folder, name, reader, key)]
    except (DamagedError, OSError, ValueError, KeyError):
        return ""
    shown = ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
    return f" (in {shown})" if keys else ""


def _changed(folder: Path, name: str, reader: Reader, key: str) -> bool:
    info = reader.tensors[key]
    for piece in reader.pieces(key):
        if piece.file == name:
            size = info.piece_bytes(piece.shape)
            with (folder / name).open("rb") as file:
                file.seek(piece.position + info.number * size)
                if xxhash.xxh3_64(file.read(size)).hexdigest() != piece.hashes[info.number]:
                    return True
    return False
