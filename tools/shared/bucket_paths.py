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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from program import command
from program.buckets import client, names, transfer
from program.buckets.client import ObjectFacts
from program.errors import UserError
from tools.shared.resumable import bar_of_bytes
from training.checkpoint import folders
from training.checkpoint.bucket import stored
from training.checkpoint.format.manifest import MANIFEST, DamagedError

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
        newest = folder / found[0].name.partition("-")[0]
        if tensors:
            return _fetched(list(found[0].files.values()), found[0].url, newest)
        for one in found:
            target = folder / one.name.partition("-")[0]
            _fetched([one.files[name] for name in stored.small_files(one)], one.url, target)
            for name, facts in one.files.items():
                with (target / name).open("ab") as file:
                    file.truncate(facts.size)
        folders.point_to(newest)
        return folder
    except OSError as error:
        raise UserError(stored.said(error, what.strip() or url)) from None


def _fetched(objects: Sequence[ObjectFacts], url: str, folder: Path) -> Path:
    needed, free = sum(facts.size for facts in objects), shutil.disk_usage(folder.parent).free
    if not objects:
        raise UserError(f"{url}: nothing is there. Give the URL of a checkpoint, a folder or a checkpoint.bucket.")
    if needed > free:
        raise UserError(f"{url}: takes {needed:,} bytes, and {folder.parent} has {free:,}. Set TMPDIR to another disk.")
    with bar_of_bytes(needed, "fetching") as bar:
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
            with bar_of_bytes(sum(file.stat().st_size for file in files), "uploading") as bar:
                for file in files:
                    transfer.upload(file, names.joined(url, str(file.relative_to(target))), bar.update)
    except OSError as error:
        if names.is_url(str(error.filename)):
            raise UserError(stored.said(error, what)) from None
        raise
    print(f"uploaded {url}")


def run[T](program: str, job: T, act: Callable[[T], None], target: str, sources: Sequence[str]) -> int:
    """``act`` on a tool's flags, with folders in place of URLs in the fields of these names. Exit code 0, or that of
    what was raised, which is said."""
    try:
        with written_to(getattr(job, target), target.upper()) as place:
            given = {name: value for name in sources if (value := getattr(job, name)) is not None}
            fetched = {name: here(value, f"{name.upper()} ") for name, value in given.items()}
            act(dataclasses.replace(job, **{target: place}, **fetched))  # type: ignore[type-var]
    except (UserError, DamagedError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        return command.os_error(program, error)
    except KeyboardInterrupt:
        print(f"{program}: interrupted; the same command continues it, or starts over", file=sys.stderr)
        return command.INTERRUPTED
    return 0


def _remove(folder: Path, owner: int) -> None:
    """By the process that has made it: a fork would, too."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
