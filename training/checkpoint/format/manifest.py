"""``manifest.json``: what makes a folder a checkpoint. Sizes and hashes of all files, and of itself. No torch here."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from parallel.errors import UserError
from training.checkpoint.format.tables import FileFacts
from training.checkpoint.format.writer import DATA, TABLE, write_durably

MANIFEST = "manifest.json"
FORMAT = 2
JSON = None | bool | int | float | str | list[Any] | dict[str, Any]


@dataclass(slots=True, frozen=True, kw_only=True)
class Manifest:
    """What a committed checkpoint says of itself."""

    files: Mapping[str, FileFacts]
    """Every file of the folder but this one, by its name."""
    about: Mapping[str, JSON] = field(default_factory=dict)
    """Iteration, attempt, layout, versions, configuration, data: whatever the writer wants to be found."""


class DamagedError(Exception):
    """A file of a checkpoint is not what was written: names the file, what was expected, and what is there."""


def write_manifest(folder: Path, known: Mapping[str, FileFacts], about: Mapping[str, JSON]) -> Manifest:
    """The only commit point. ``known``: files whose writers hashed them; the others, which are small, are read."""
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file() and not _is_own(entry.name))
    if unknown := [name for name in names if name.endswith(DATA) and name not in known]:
        raise DamagedError(f"{folder / unknown[0]}: no writer has said what is in it")
    files = {name: known[name] if name in known else facts_of(folder / name) for name in names}
    if missing := sorted(known.keys() - files.keys()):
        raise DamagedError(f"{folder / missing[0]}: written, but not there any more")
    manifest = Manifest(files=files, about=about)
    write_durably(folder / MANIFEST, _encoded(manifest))
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Raises DamagedError where it is missing or not as it was written, UserError where a later version wrote it."""
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
        values = json.loads(data)
        own = values.pop("hash")
        if own != _own_hash(values):
            raise ValueError(f"expected the hash that it tells, {own}, found {_own_hash(values)}")
        written = values["format"]
        if isinstance(written, int) and written > FORMAT:  # behind the hash: a flipped bit makes a later format, too
            raise UserError(f"{path} has format {written}; this version of Triplane reads {FORMAT}. Update Triplane.")
        if data != _as_bytes(values):
            raise ValueError("its content is laid out otherwise than it was written")
        return Manifest(
            files={name: FileFacts(*facts) for name, facts in values["files"].items()}, about=values["about"]
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{path}: not the manifest of a checkpoint ({error})") from None


def facts_of(path: Path) -> FileFacts:
    """Size and xxh3_128 of a small file."""
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb", buffering=0) as file:
        while data := file.read(16 << 20):
            digest.update(data)
            size += len(data)
    return FileFacts(size, digest.hexdigest())


def _is_own(name: str) -> bool:
    return name == MANIFEST or name.endswith((TABLE, ".partial"))


def _encoded(manifest: Manifest) -> bytes:
    return _as_bytes({"format": FORMAT, "about": dict(manifest.about), "files": dict(manifest.files)})


def _as_bytes(values: Mapping[str, Any]) -> bytes:
    return (json.dumps({**values, "hash": _own_hash(values)}, indent=1) + "\n").encode()


def _own_hash(values: Mapping[str, Any]) -> str:
    """Of everything else in the manifest, however it is laid out."""
    return xxhash.xxh3_128(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
