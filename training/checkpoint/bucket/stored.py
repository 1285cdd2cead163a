"""What lies in a bucket of checkpoints, and which of it counts."""

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from program.buckets import client, names, transfer
from program.buckets.client import ObjectFacts
from program.errors import UserError
from program.untrusted import JSON_BYTES
from training.checkpoint import folders
from training.checkpoint.format.manifest import MANIFEST, DamagedError, manifest_of
from training.checkpoint.format.writer import DATA
from training.checkpoint.lineage import LineageCommit, commit_of

HASH_DIGITS = 8
"""Of a manifest's hash, in the name of its folder."""
_NAME = re.compile(rf"iter_(\d{{7,15}})(-[0-9a-f]{{{HASH_DIGITS}}})?")


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A folder in a bucket that has, or is to have, a manifest."""

    url: str
    files: Mapping[str, ObjectFacts]

    @property
    def name(self) -> str:
        """Of the folder."""
        return names.last(self.url)

    @property
    def iteration(self) -> int:
        """By its name; 0 where that tells none."""
        match = _NAME.fullmatch(self.name)
        return int(match[1]) if match else 0

    @property
    def is_complete(self) -> bool:
        """Whether its manifest is there, which comes last."""
        return MANIFEST in self.files


def root_of(url: str) -> str:
    """The folder of a run's checkpoints below ``checkpoint.bucket``."""
    return names.joined(url, "checkpoints")


def name_of(folder: Path, manifest_hash: str) -> str:
    """In a bucket, of a run's own checkpoint."""
    return f"{folder.name}-{manifest_hash[:HASH_DIGITS]}"


def stored(url: str) -> list[StoredCheckpoint]:
    """The folders with a checkpoint's name at a URL, complete or not; the URL itself where a manifest lies right there.

    One that ``latest`` names is found although the listing lags. Raises OSError.
    """
    url, found = url.rstrip("/"), defaultdict[str, dict[str, ObjectFacts]](dict)
    for one in client.listed(f"{url}/"):
        found[names.parent(one.url)][names.last(one.url)] = one
    roots = (url, root_of(url))
    for root in roots:
        # Who may not list all of a bucket gets 403 from AWS for a key that is not there.
        with contextlib.suppress(FileNotFoundError, PermissionError, UserError):
            latest = client.read(names.joined(root, folders.LATEST), folders.NAME_BYTES)
            name = latest.decode(errors="replace").strip()
            if _NAME.fullmatch(name) and MANIFEST not in found.get(folder := names.joined(root, name), {}):
                files = _asked_for(folder)
                found[folder] |= files
    return [
        StoredCheckpoint(one, files)
        for one, files in sorted(found.items())
        if (names.parent(one) in roots and _NAME.fullmatch(names.last(one))) or (one == url and MANIFEST in files)
    ]


def _asked_for(folder: str) -> dict[str, ObjectFacts]:
    """A checkpoint's files, one by one, by its manifest. Raises FileNotFoundError where that is not there."""
    found = {MANIFEST: client.facts(names.joined(folder, MANIFEST))}
    with contextlib.suppress(DamagedError, UserError):  # it is said when it is fetched
        manifest = manifest_of(client.read(found[MANIFEST].url, JSON_BYTES), Path(MANIFEST))
        for name in manifest.files:
            with contextlib.suppress(FileNotFoundError):
                found[name] = client.facts(names.joined(folder, name))
    return found


def commits(there: Iterable[StoredCheckpoint]) -> dict[LineageCommit, StoredCheckpoint]:
    """The complete ones, by what their manifests say; those that retention has taken meanwhile, or that cannot be read,
    are left out. Raises OSError."""
    found = {}
    for one in there:
        if one.is_complete and 0 < (facts := one.files[MANIFEST]).size <= JSON_BYTES:
            with contextlib.suppress(FileNotFoundError):
                data = client.opened(facts).read_range(0, facts.size)
                commit = commit_of(data, Path(one.name), one.iteration, facts.changed_ns)
                if commit.hash and not (one.iteration and commit.is_misnamed):
                    found[commit] = one
    return found


def small_files(of: StoredCheckpoint) -> list[str]:
    """All but those of tensors."""
    return [name for name in of.files if not name.endswith(DATA)]


def newer(root: Path | None, url: str) -> list[StoredCheckpoint]:
    """Those to continue from before any in ``root``, a run's own folder, the best first; empty where one of its own is
    best. Without ``root`` all of them. Raises OSError."""
    there = commits(stored(url))
    order = folders.in_turn(root, list(there))
    return [there[one] for one in takewhile(there.__contains__, order)]


def find(url: str, field: str) -> list[StoredCheckpoint]:
    """The checkpoints at a URL that a user gave, the best first. Raises UserError where there are none, or the server
    does not say."""
    try:
        found = newer(None, url)
    except OSError as error:
        raise UserError(said(error, field)) from None
    if not found:
        raise UserError(
            f"{field} {url}: expected a checkpoint (a folder with {MANIFEST}), a folder of checkpoints or a run's "
            "checkpoint.bucket; found none there. Give the URL of one that has come whole."
        )
    return found


def said(error: OSError, field: str) -> str:
    """What a server's error is to a user: the object, its status and code, what to do, and the setting."""
    return f"{field}: {error.filename}: {(error.strerror or str(error)).rstrip('.')}."


def fetched(of: StoredCheckpoint, folder: Path, share: Iterable[str]) -> None:
    """Download some of a checkpoint's files into ``folder``; but for those that are there. Raises OSError."""
    for name in share:
        facts, path = of.files[name], folder / name
        if not path.is_file() or path.stat().st_size != facts.size:
            transfer.download(facts, path)
