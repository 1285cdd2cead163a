"""``manifest.json``: what makes a folder a checkpoint. Sizes and hashes of all files, and of itself."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from program.durable import replace_file
from program.errors import UserError
from program.schema import JSON, Count, structured
from program.untrusted import JSON_BYTES, InputError, open_regular, parse_json, read_bytes
from training.checkpoint.format.tables import FileFacts
from training.checkpoint.format.writer import DATA, TABLE

MANIFEST = "manifest.json"
FORMAT = 2
MOST_ANCESTORS = 100


@dataclass(slots=True, frozen=True, kw_only=True)
class Lineage:
    """Which checkpoints of its run a checkpoint descends from."""

    number: Count = 0
    """Of this commit among all of the run, from 1; 0 in checkpoints of versions before November 2026."""
    ancestors: tuple[str, ...] = ()
    """``hash`` of the manifests of its parent, that one's parent, ...: the last MOST_ANCESTORS."""
    loaded: str | None = None
    """``hash`` of the run's own checkpoint that --checkpoint.load went back to, since when it counts as done."""


@dataclass(slots=True, frozen=True, kw_only=True)
class CheckpointManifest:
    """What a committed checkpoint says of itself."""

    files: Mapping[str, FileFacts]
    """Every file of the folder but this one, by its name."""
    about: Mapping[str, JSON] = field(default_factory=dict)
    """Iteration, attempt, layout, versions, configuration, data: whatever the writer wants to be found."""
    hash: str = ""
    """Of all the rest: what other checkpoints' lineage calls this one by. Made when it is written."""

    @property
    def lineage(self) -> Lineage:
        """Empty in checkpoints of versions that kept none."""
        found, problems = structured(self.about.get("lineage") or {}, Lineage)
        return Lineage() if problems else found


class DamagedError(Exception):
    """A file of a checkpoint is not what was written: names the file, what was expected, and what is there.

    by_system: the system refused to read it (an I/O error, no permission), which may pass.
    """

    def __init__(self, text: str, by_system: bool = False) -> None:
        super().__init__(text)
        self.by_system = by_system


def write_manifest(folder: Path, known: Mapping[str, FileFacts], about: Mapping[str, JSON]) -> CheckpointManifest:
    """The last file before the commit, which is the rename (``folders.give_name``).

    known: files whose writers hashed them; the others, which are small, are read.
    """
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file() and not _is_own(entry.name))
    if unknown := [name for name in names if name.endswith(DATA) and name not in known]:
        raise DamagedError(f"{folder / unknown[0]}: no writer has said what is in it")
    files = {name: known[name] if name in known else facts_of(folder / name) for name in names}
    if missing := sorted(known.keys() - files.keys()):
        raise DamagedError(f"{folder / missing[0]}: written, but not there any more")
    values: dict[str, Any] = {"format": FORMAT, "about": dict(about), "files": files}
    replace_file(folder / MANIFEST, _as_bytes(values))
    return CheckpointManifest(files=files, about=about, hash=_own_hash(values))


def read_manifest(folder: Path) -> CheckpointManifest:
    """Raises DamagedError where it is missing or not as it was written, UserError where a later version wrote it."""
    path = folder / MANIFEST
    try:
        data = read_bytes(path, JSON_BYTES)
    except InputError as error:
        raise DamagedError(f"{path}: not the manifest of a checkpoint ({error.problem})") from None
    except OSError as error:
        gone = isinstance(error, FileNotFoundError)
        raise DamagedError(f"{path}: not the manifest of a checkpoint ({error})", by_system=not gone) from None
    return manifest_of(data, path)


def manifest_of(data: bytes, path: Path) -> CheckpointManifest:
    """Its content. Raises as ``read_manifest``."""
    try:
        values = parse_json(data, dict[str, JSON], path)
        own = values.pop("hash", None)
        if own != _own_hash(values):
            raise InputError(path, f"expected the hash that it tells, {own}, found {_own_hash(values)}")
        written = values.get("format")
        if isinstance(written, int) and written > FORMAT:  # behind the hash: a flipped bit makes a later format, too
            raise UserError(f"{path} has format {written}; this version of Triplane reads {FORMAT}. Update Triplane.")
        if data != _as_bytes(values):
            raise InputError(path, "its content is laid out otherwise than it was written")
        manifest: CheckpointManifest = parse_json(data, CheckpointManifest, path)
        if outside := [name for name in manifest.files if Path(name).name != name]:
            raise InputError(path, f"names {outside[0]!r}, which is no file of this folder")
        return manifest
    except InputError as error:
        raise DamagedError(f"{path}: not the manifest of a checkpoint ({error.problem})") from None


def facts_of(path: Path) -> FileFacts:
    """Size and xxh3_128 of a small file. Raises InputError for what is no regular file, OSError."""
    digest, size = xxhash.xxh3_128(), 0
    with open_regular(path) as file:
        while data := file.read(16 << 20):
            digest.update(data)
            size += len(data)
    return FileFacts(size, digest.hexdigest())


def _is_own(name: str) -> bool:
    return name == MANIFEST or name.endswith((TABLE, ".partial"))


def _as_bytes(values: Mapping[str, Any]) -> bytes:
    return (json.dumps({**values, "hash": _own_hash(values)}, indent=1) + "\n").encode()


def _own_hash(values: Mapping[str, Any]) -> str:
    """Of everything else in the manifest, however it is laid out."""
    return xxhash.xxh3_128(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
