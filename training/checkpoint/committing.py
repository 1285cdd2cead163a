"""The last step of a save, by one process: tables put together, the manifest, the name, ``latest``."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from program.durable import replace_file
from program.schema import Text
from training.checkpoint import folders, room
from training.checkpoint.format.manifest import Lineage, write_manifest
from training.checkpoint.format.tables import merge, remove_tables
from training.checkpoint.format.writer import TABLE
from training.checkpoint.lineage import following
from training.run_lock.lock import RunLock, fenced


@dataclass(slots=True, frozen=True, kw_only=True)
class FilledFolder:
    """A temporary folder with the files of all writers, and what else makes a checkpoint of it."""

    folder: Text
    writers: tuple[str, ...]
    """The names of their files."""
    texts: Mapping[str, Text]
    """Small files to write, state.json among them, by name."""
    copies: Mapping[str, Text] = field(default_factory=dict)
    """Files to copy, by name: paths."""
    about: Mapping[str, Any]
    """What the manifest says of the checkpoint."""
    keep: int
    """Newest checkpoints to keep in all."""
    retain_interval: int | None = None
    """Iterations that this divides are kept for good."""
    milestones: tuple[int, ...] = ()
    """Iterations that are kept for good: where stages end."""
    parent: str | None = None
    """The checkpoint beside it that it descends from, by name."""
    loaded: str | None = None
    """See ``Lineage``."""


def commit(filled: FilledFolder, lock: RunLock | None = None) -> tuple[Path, int]:
    """Make a checkpoint of a temporary folder: its path and its bytes.

    Raises IncompleteError where the writers' pieces are not each tensor once, OSError where the disk does not take it,
    LockLost where the run's folder is not ``lock``'s any more, before the commit or behind it. Earlier checkpoints are
    untouched then.
    """
    folder = Path(filled.folder)
    with room.explain_full_disk(folder, _small_bytes(filled)):
        facts = merge(folder, filled.writers)
        remove_tables(folder, filled.writers)
        for name, source in filled.copies.items():
            folders.copy(Path(source), folder / name)
        for name, text in filled.texts.items():
            replace_file(folder / name, text.encode())
        with fenced(lock):
            lineage = _lineage(folder.parent, filled.parent, filled.loaded)
            manifest = write_manifest(folder, facts, {**filled.about, "lineage": asdict(lineage)})
            path = folders.give_name(folder)
    folders.point_to(path)
    folders.prune(path.parent, filled.keep, filled.retain_interval, filled.milestones)
    return path, sum(file.bytes for file in manifest.files.values())


def _lineage(root: Path, parent: str | None, loaded: str | None) -> Lineage:
    commits = folders.commits(root)
    return following(next((one for one in commits if one.path.name == parent), None), commits, loaded)


def _small_bytes(filled: FilledFolder) -> int:
    """About what comes to the tensors: the tables once more, and the texts."""
    tables = sum((Path(filled.folder) / f"{name}{TABLE}").stat().st_size for name in filled.writers)
    return tables + sum(len(text.encode()) for text in filled.texts.values())
