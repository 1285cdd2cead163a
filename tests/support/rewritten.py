"""A committed checkpoint, changed by somebody who makes its hashes fit again."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from training.checkpoint.folders import STATE
from training.checkpoint.format.manifest import read_manifest, write_manifest
from training.checkpoint.format.reader import FileReader
from training.checkpoint.format.tables import INDEX, PIECES, FileFacts
from training.checkpoint.format.verify import damages
from training.checkpoint.format.writer import DATA, LENGTH_BYTES


def copy_of(run: Path, target: Path) -> Path:
    """A run's folder to go on with."""
    return Path(shutil.copytree(run, target, symlinks=True))


def rehash(folder: Path, about: Callable[[dict[str, Any]], None] = lambda _: None, **facts: FileFacts) -> None:
    """The manifest of what lies there now. facts: of changed files of tensors, by their names without the ending."""
    manifest = read_manifest(folder)
    said = dict(manifest.about)
    about(said)
    old = {name: found for name, found in manifest.files.items() if name.endswith(DATA)}
    tensors = {name: facts.get(name.removesuffix(DATA), found) for name, found in old.items()}
    write_manifest(folder, tensors, said)
    assert not damages(folder, "hashes")


def change_state(
    folder: Path, change: Callable[[dict[str, Any]], None], about: Callable[[dict[str, Any]], None] = lambda _: None
) -> None:
    """Change ``state.json``, and what the manifest says."""
    state = json.loads((folder / STATE).read_text())
    change(state)
    (folder / STATE).write_text(json.dumps(state))
    rehash(folder, about)


def change_text(folder: Path, name: str, text: str | bytes) -> None:
    """Another content of a small file."""
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    rehash(folder)


def change_number(folder: Path, key: str, value: float, element: int = 0) -> str:
    """Write fp32 ``value`` into a tensor, and every hash of it again: the name of the file it lies in."""
    with FileReader(folder) as reader:
        number, [piece, *_] = reader.tensors[key].number, reader.pieces(key)
        size = reader.tensors[key].piece_bytes(piece.shape)
    path, start = folder / piece.file, piece.position + number * size
    content = bytearray(path.read_bytes())
    content[start + 4 * element : start + 4 * element + 4] = np.float32(value).tobytes()
    digest = xxhash.xxh3_64(content[start : start + size]).hexdigest()
    old = piece.hashes[number]
    length = int.from_bytes(content[-LENGTH_BYTES:], "little")
    table = bytes(content[-LENGTH_BYTES - length : -LENGTH_BYTES])
    assert table.count(old.encode()) == 1
    table = table.replace(old.encode(), digest.encode())
    content[-LENGTH_BYTES - length : -LENGTH_BYTES] = table
    path.write_bytes(content)
    for name in (PIECES, INDEX):
        (folder / name).write_text((folder / name).read_text().replace(old, digest))
    rehash(folder, **{path.stem: FileFacts(len(content), xxhash.xxh3_128(table).hexdigest())})
    return path.name
