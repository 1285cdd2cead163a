"""The last step of a save, by one process: tables put together, the manifest, the name, ``latest``. No torch here."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from training.checkpoint import folders, room
from training.checkpoint.format.manifest import JSON, write_manifest
from training.checkpoint.format.tables import merge, remove_tables
from training.checkpoint.format.writer import TABLE, write_durably
from training.owner.claim import Claim, fenced


def commit(
    folder: Path,
    writers: Sequence[str],
    *,
    texts: Mapping[str, str],
    copies: Mapping[str, str],
    about: Mapping[str, JSON],
    keep: int,
    retain_interval: int | None,
    claim: Claim | None = None,
) -> tuple[Path, int]:
    """Make a checkpoint of the temporary ``folder`` that ``writers`` have filled: its path and its bytes.

    texts, copies: small files to write, and files to copy, by name. Raises IncompleteError where the writers' pieces
    are not each tensor once, OSError where the disk does not take it, LostOwnership where the run's folder is not
    ``claim``'s any more, before the commit or behind it. Earlier checkpoints are untouched then.
    """
    with room.explained(folder, _small_bytes(folder, writers, texts)):
        facts = merge(folder, writers)
        remove_tables(folder, writers)
        for name, source in copies.items():
            folders.copy(Path(source), folder / name)
        for name, text in texts.items():
            write_durably(folder / name, text.encode())
        with fenced(claim):
            manifest = write_manifest(folder, facts, about)
            path = folders.give_name(folder)
    folders.point_to(path)
    folders.prune(path.parent, keep, retain_interval)
    return path, sum(file.bytes for file in manifest.files.values())


def _small_bytes(folder: Path, writers: Sequence[str], texts: Mapping[str, str]) -> int:
    """About what comes to the tensors: the tables once more, and the texts."""
    tables = sum((folder / f"{name}{TABLE}").stat().st_size for name in writers)
    return tables + sum(len(text.encode()) for text in texts.values())
