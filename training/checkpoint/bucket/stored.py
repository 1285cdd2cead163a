"""What lies in a bucket of checkpoints, and which of it counts."""

import contextlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from program.buckets import client, names, transfer
from program.buckets.client import ObjectFacts
from program.errors import UserError
from program.untrusted import JSON_BYTES
from training.checkpoint import folders
from training.checkpoint.format.manifest import MANIFEST
from training.checkpoint.format.writer import DATA
from training.checkpoint.lineage import LineageCommit, commit_of, in_order, newest

HASH_DIGITS = 8
"""Of a manifest's hash, in the name of its folder."""
_NAME = re.compile(rf"iter_(\d{{7,15}})(-[0-9a-f]{{{HASH_DIGITS}}})?")
_FOLDER = re.compile(r"((?:checkpoints/)?(?:iter_[^/]*/)?)([^/]+)")
"""What stands behind a URL that means checkpoints: one, a folder of them, or a run's prefix."""


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


def name_of(commit: LineageCommit) -> str:
    """Of a checkpoint's folder in a bucket."""
    return f"{folders.name_of(commit.iteration)}-{commit.hash[:HASH_DIGITS]}"


def stored(url: str) -> list[StoredCheckpoint]:
    """The folders with a checkpoint's name at a URL, complete or not; the URL itself where a manifest lies right there.

    One that ``latest`` names is found although the listing lags. Raises OSError.
    """
    prefix, found = f"{url.rstrip('/')}/", defaultdict[str, dict[str, ObjectFacts]](dict)
    for one in client.listed(prefix):
        if match := _FOLDER.fullmatch(one.url.removeprefix(prefix)):
            found[match[1]][match[2]] = one
    for folder, files in list(found.items()):
        if folders.LATEST in files and MANIFEST not in files:
            with contextlib.suppress(FileNotFoundError, UserError):
                name = client.read(files[folders.LATEST].url, folders.NAME_BYTES).decode(errors="replace").strip()
                if _NAME.fullmatch(name) and MANIFEST not in found.get(f"{folder}{name}/", {}):
                    manifest = client.facts(f"{prefix}{folder}{name}/{MANIFEST}")
                    others = client.listed(f"{prefix}{folder}{name}/")
                    found[f"{folder}{name}/"] |= {names.last(one.url): one for one in [*others, manifest]}
    named = {f"{prefix}{folder}".rstrip("/"): files for folder, files in found.items()}
    return [
        StoredCheckpoint(one, files)
        for one, files in sorted(named.items())
        if _NAME.fullmatch(names.last(one)) or (one == prefix.rstrip("/") and MANIFEST in files)
    ]


def commits(there: Iterable[StoredCheckpoint]) -> Iterator[tuple[LineageCommit, StoredCheckpoint]]:
    """The complete ones, with what their manifests say; those that retention has taken meanwhile, or that cannot be
    read, are left out. Raises OSError."""
    for one in there:
        if one.is_complete and (facts := one.files[MANIFEST]).size <= JSON_BYTES:
            with contextlib.suppress(FileNotFoundError):
                data = client.opened(facts).read_range(0, facts.size)
                commit = commit_of(data, Path(one.name), one.iteration, facts.changed_ns)
                if commit.hash and not (one.iteration and commit.is_misnamed):
                    yield commit, one


def small_files(of: StoredCheckpoint) -> list[str]:
    """All but those of tensors."""
    return [name for name in of.files if not name.endswith(DATA)]


def newer(root: Path | None, url: str) -> list[StoredCheckpoint]:
    """Those to continue from before any in ``root``, a run's own folder, the best first; empty where one of its own is
    best. Without ``root`` all of them, in the order of ``folders.candidates``. Raises OSError."""
    own = [one for one in folders.commits(root) if not one.is_misnamed] if root else []
    hashes = {one.hash for one in own}
    there = {commit.path: (commit, one) for commit, one in commits(stored(url)) if commit.hash not in hashes}
    every = own + [commit for commit, _ in there.values()]
    latest, written_ns = folders.named_latest(root) if root else (None, 0)
    first = newest(every, next((one for one in own if one.path == latest), None), written_ns)
    order = in_order(every, first) if first else []
    return [there[one.path][1] for one in takewhile(lambda one: one.path in there, order)]


def find(url: str, field: str) -> list[StoredCheckpoint]:
    """The checkpoints at a URL that a user gave, the best first. Raises UserError where there are none, or the server
    does not say."""
    if text := names.problem(url):
        raise UserError(f"{field}: {text}")
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


def fetched(
    of: StoredCheckpoint, folder: Path, share: Iterable[str], report: Callable[[int], object] = lambda _: None
) -> None:
    """Download some of a checkpoint's files into ``folder``; but for those that are there. Raises OSError."""
    for name in share:
        facts, path = of.files.get(name) or client.facts(names.joined(of.url, name)), folder / name
        if not path.is_file() or path.stat().st_size != facts.size:
            transfer.download(facts, path)
        report(facts.size)
