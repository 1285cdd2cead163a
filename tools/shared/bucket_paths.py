"""Paths of tools that are URLs of a bucket: what is there is fetched to the disk first, what is written is uploaded.

Both go through folders in TMPDIR, which are gone with the tool: memory is what the tool takes of folders.
"""

import atexit
import contextlib
import dataclasses
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from program.buckets import client, names, transfer
from program.buckets.client import ObjectFacts
from program.errors import UserError
from training.checkpoint import folders
from training.checkpoint.bucket import stored
from training.checkpoint.format.manifest import MANIFEST

LAST = (".metadata", "latest_checkpointed_iteration.txt", "config.json", "model.safetensors.index.json", MANIFEST)
"""What makes a folder whole of those who read it: uploaded behind everything else, in this order."""


def here(path: Path, what: str = "", *, tensors: bool = True) -> Path:
    """``path`` itself; of a URL a folder with what is there: of checkpoints the newest, else all objects below it.

    tensors: or else the small files of every checkpoint there, and in place of the others empty ones of their sizes.
    what: how the tool calls it. Raises UserError where nothing is there, the server fails or the disk is full.
    """
    url = names.of_path(path)
    if url is None:
        return path
    if text := names.problem(url):
        raise UserError(f"{what}{text}")
    folder = Path(tempfile.mkdtemp(prefix="triplane-fetched-"))
    atexit.register(_remove, folder, os.getpid())
    try:
        found = stored.newer(None, url)
        if not found:
            return _fetched(client.listed(f"{url.rstrip('/')}/"), url, folder / names.last(url))
        for one in found if not tensors else found[:1]:
            target = folder / one.name.partition("-")[0]
            _fetched([one.files[name] for name in (one.files if tensors else stored.small_files(one))], one.url, target)
            for name, facts in one.files.items():
                if not (target / name).exists():
                    target.joinpath(name).touch()
                    os.truncate(target / name, facts.size)
        if not tensors:
            folders.point_to(folder / found[0].name.partition("-")[0])
    except OSError as error:
        raise UserError(stored.said(error, what.strip() or url)) from None
    return folder if not tensors else folder / found[0].name.partition("-")[0]


def _fetched(objects: Sequence[ObjectFacts], url: str, folder: Path) -> Path:
    needed, free = sum(facts.size for facts in objects), shutil.disk_usage(folder.parent).free
    if not objects:
        raise UserError(f"{url}: nothing is there. Give the URL of a checkpoint, a folder or a checkpoint.bucket.")
    if needed > free:
        raise UserError(f"{url}: takes {needed:,} bytes, and {folder.parent} has {free:,}. Set TMPDIR to another disk.")
    with _bar(needed, "fetching") as bar:
        for facts in objects:
            name = Path(facts.url.removeprefix(f"{url.rstrip('/')}/"))
            if name.is_absolute() or ".." in name.parts:
                raise UserError(f"{facts.url}: would lie outside of the folder that is fetched. Remove that object.")
            transfer.download(facts, folder / name, bar.update)
    return folder


@contextlib.contextmanager
def written_to(path: Path, what: str) -> Iterator[Path]:
    """Where to write what is to be at ``path``; of a URL a folder in TMPDIR that is uploaded at the end, what makes it
    whole last. Raises UserError where something is there already, or the server fails."""
    url = names.of_path(path)
    if url is None:
        yield path
        return
    if text := names.problem(url):
        raise UserError(f"{what}: {text}")
    try:
        if client.listed(f"{url.rstrip('/')}/"):
            raise UserError(f"{what} {url}: already there. Give a name that is free, or remove it.")
        with tempfile.TemporaryDirectory(prefix="triplane-written-") as scratch:
            target = Path(scratch) / names.last(url)
            yield target
            files = [file for file in target.rglob("*") if file.is_file()]
            files.sort(key=lambda file: (file.name in LAST and LAST.index(file.name) + 1, str(file)))
            with _bar(sum(file.stat().st_size for file in files), "uploading") as bar:
                for file in files:
                    transfer.upload(file, names.joined(url, str(file.relative_to(target))), bar.update)
    except OSError as error:
        if names.is_url(str(error.filename)):
            raise UserError(stored.said(error, what)) from None
        raise
    print(f"uploaded {url}")


@contextlib.contextmanager
def on_disk[T](job: T, target: str, sources: Sequence[str]) -> Iterator[T]:
    """A tool's flags, with folders in place of URLs in the fields of these names. Raises UserError as ``here`` and
    ``written_to``."""
    with written_to(getattr(job, target), target.upper()) as place:
        given = {name: value for name in sources if (value := getattr(job, name)) is not None}
        fetched = {name: here(value, f"{name.upper()} ") for name, value in given.items()}
        yield dataclasses.replace(job, **{target: place}, **fetched)  # type: ignore[type-var]


def _bar(total: int, title: str) -> tqdm:
    return tqdm(total=total, desc=title, unit="B", unit_scale=True, mininterval=0.5 if sys.stderr.isatty() else 30)


def _remove(folder: Path, owner: int) -> None:
    """By the process that has made it: a fork would, too."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
