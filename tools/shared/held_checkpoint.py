"""One way to open a checkpoint for every tool: a training that goes on may delete it at any moment (checkpoint.keep).

folder = find(path)              what a path means: a checkpoint, or the newest of a run's
held = HeldCheckpoint.of(path)   its files open from now on: what deletes them takes no tensor from this tool
with deleted_is_said(folder):    around what opens files as it goes: one that was deleted is not called damaged
"""

import contextlib
import errno
import os
import resource
import shutil
import sys
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from program.errors import UserError
from program.untrusted import InputError, regular_descriptor
from tools.shared.bucket_paths import here
from training.checkpoint import folders
from training.checkpoint.format.manifest import MANIFEST, DamagedError, read_manifest

TRIES = 3
"""A run that saves deletes its oldest checkpoint once more in the moment in which the newest is opened."""
SPARE_FILES = 512
"""That libraries, connections and ranks open, beside a checkpoint's."""


def find(path: Path, what: str = "") -> Path:
    """The checkpoint that a path means, or a URL. what: how the tool calls it. Raises UserError where there is none."""
    try:
        return folders.find(str(here(path, what)), partial(print, file=sys.stderr))[0]
    except UserError as error:
        raise UserError(f"{what}{str(error).removeprefix('checkpoint.load ')}") from None


@contextlib.contextmanager
def deleted_is_said(*held: Path) -> Iterator[None]:
    """Around what reads checkpoints. Raises UserError for one that is not there any more, or is another one, whatever
    has failed for want of it."""
    before = [_stamp(folder) for folder in held]
    try:
        yield
    except (UserError, DamagedError, InputError, OSError, RuntimeError, ValueError) as error:
        gone = [folder for folder, stamp in zip(held, before, strict=True) if _stamp(folder) != stamp]
        if not gone or isinstance(error, BrokenPipeError):
            raise
        raise UserError(deleted(gone[0])) from None


def deleted(folder: Path) -> str:
    """What is said of a checkpoint that went while it was read."""
    return (
        f"{folder} was deleted or replaced while it was read, as a training does that goes on (checkpoint.keep). Give "
        f"the run's folder for its newest, or keep one for good: checkpoint.save_retain_interval."
    )


def _stamp(folder: Path) -> tuple[int, int] | None:
    """Tells a committed checkpoint from another of the same name; None where none is."""
    try:
        found = (folder / MANIFEST).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


@dataclass(eq=False, frozen=True)
class HeldCheckpoint:
    """A checkpoint whose files are open for as long as this lives."""

    folder: Path
    """Where it is, or was."""
    files: Path
    """A folder of links to the open files, for this process and those that it starts; where there are too many to be
    held, ``folder`` itself."""
    stamp: tuple[int, int] | None
    """Of the checkpoint that was there."""

    @classmethod
    def of(cls, path: Path) -> "HeldCheckpoint":
        """The checkpoint that a path means. Raises UserError where there is none, or it went."""
        for _ in range(TRIES):
            folder = find(path)
            stamp = _stamp(folder)
            if stamp is not None and (found := cls._hold(folder, stamp)) is not None and _stamp(folder) == stamp:
                return found
        raise UserError(deleted(folder))

    @classmethod
    def _hold(cls, folder: Path, stamp: tuple[int, int]) -> "HeldCheckpoint | None":
        """None where a file of it is gone, since the folder is."""
        try:
            names = [MANIFEST, *read_manifest(folder).files]
        except DamagedError:
            return cls(folder, folder, stamp) if (folder / MANIFEST).is_file() else None
        if len(names) + SPARE_FILES > resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
            return cls(folder, folder, stamp)
        try:
            links = Path(tempfile.mkdtemp(prefix="triplane-held-"))
        except OSError:
            return cls(folder, folder, stamp)
        descriptors = list[int]()
        release = partial(_release, os.getpid(), descriptors, links)
        try:
            descriptors += _linked(folder, names, links / folder.name)
        except OSError:
            release()
            return cls(folder, folder, stamp)
        if not (folder / MANIFEST).is_file():
            release()
            return None
        held = cls(folder, links / folder.name, stamp)
        if not (held.files / MANIFEST).is_file():  # without /proc
            release()
            return cls(folder, folder, stamp)
        weakref.finalize(held, release)
        return held

    @contextlib.contextmanager
    def reading(self) -> Iterator[Path]:
        """The folder to read from. What is raised names the checkpoint by its own path; where it was not held, or on a
        file server that another machine makes forget it, it may be that it was deleted."""
        try:
            yield self.files
        except (UserError, DamagedError) as error:
            text = str(error).replace(str(self.files), str(self.folder))
            is_held = self.files != self.folder and os.strerror(errno.ESTALE) not in text
            error.args = (text if is_held or _stamp(self.folder) == self.stamp else deleted(self.folder),)
            raise


def _linked(folder: Path, names: Sequence[str], files: Path) -> Iterator[int]:
    """The descriptors of a folder's files, of each of which ``files`` has a link then. Raises OSError."""
    files.mkdir()
    for name in names:
        try:
            descriptor = regular_descriptor(folder / name)
        except (OSError, InputError):  # missing, unreadable or no file: who verifies it says so
            (files / name).symlink_to((folder / name).absolute())
            continue
        yield descriptor
        (files / name).symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")


def _release(owner: int, descriptors: list[int], links: Path) -> None:
    """By the process that has opened them: a fork has them, too."""
    if os.getpid() != owner:
        return
    for descriptor in descriptors:
        os.close(descriptor)
    shutil.rmtree(links, ignore_errors=True)
