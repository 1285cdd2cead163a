"""The last step of a save, by one process: tables put together, the manifest, the name, ``latest``."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from parallel.durable import replace_file
from parallel.schema import JSON
from training.checkpoint import folders, room
from training.checkpoint.format.manifest import Lineage, write_manifest
from training.checkpoint.format.tables import merge, remove_tables
from training.checkpoint.format.writer import TABLE
from training.checkpoint.lineage import following
from training.run_lock.lock import RunLock, fenced


def commit(
    folder: Path,
    writers: Sequence[str],
    *,
    texts: Mapping[str, str],
    copies: Mapping[str, str],
    about: Mapping[str, JSON],
    keep: int,
    retain_interval: int | None,
    parent: str | None = None,
    loaded: str | None = None,
    lock: RunLock | None = None,
) -> tuple[Path, int]:
    """Make a checkpoint of the temporary ``folder`` that ``writers`` have filled: its path and its bytes.

    texts, copies: small files to write, and files to copy, by name. parent: the checkpoint beside it that it descends
    from; loaded: see ``Lineage``. Raises IncompleteError where the writers' pieces
    are not each tensor once, OSError where the disk does not take it, LockLost where the run's folder is not
    ``lock``'s any more, before the commit or behind it. Earlier checkpoints are untouched then.
    """
    with room.explain_full_disk(folder, _small_bytes(folder, writers, texts)):
        facts = merge(folder, writers)
        remove_tables(folder, writers)
        for name, source in copies.items():
            folders.copy(Path(source), folder / name)
        for name, text in texts.items():
            replace_file(folder / name, text.encode())
        with fenced(lock):
            lineage = _lineage(folder.parent, parent, loaded)
            manifest = write_manifest(folder, facts, {**about, "lineage": asdict(lineage)})
            path = folders.give_name(folder)
    folders.point_to(path)
    folders.prune(path.parent, keep, retain_interval)
    return path, sum(file.bytes for file in manifest.files.values())


def _lineage(root: Path, parent: str | None, loaded: str | None) -> Lineage:
    commits = folders.commits(root)
    return following(next((one for one in commits if one.path.name == parent), None), commits, loaded)


def _small_bytes(folder: Path, writers: Sequence[str], texts: Mapping[str, str]) -> int:
    """About what comes to the tensors: the tables once more, and the texts."""
    tables = sum((folder / f"{name}{TABLE}").stat().st_size for name in writers)
    return tables + sum(len(text.encode()) for text in texts.values())
