"""Hugging Face datasets, through `datasets`: of the Hub by streaming, or a folder that `save_to_disk` left."""

import contextlib
import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.raw.identity import ends_digest
from program.errors import UserError
from program.untrusted import open_regular, read_json

if TYPE_CHECKING:
    from datasets import IterableDataset

ROWS = 10_000
"""Rows of a saved dataset that are one step of the work."""


def is_saved_dataset(folder: Path) -> bool:
    """What `Dataset.save_to_disk` leaves."""
    return (folder / "dataset_info.json").is_file() and (folder / "state.json").is_file()


@dataclass(frozen=True, slots=True)
class Name:
    """What names a dataset: OWNER/NAME[:CONFIGURATION][@SPLIT][#REVISION], or a folder in place of the first."""

    identity: str
    configuration: str | None
    split: str
    revision: str | None

    @classmethod
    def parse(cls, text: str) -> "Name":
        """Split "train" where none is named."""
        rest, _, revision = text.partition("#")
        rest, _, split = rest.partition("@")
        identity, _, configuration = rest.partition(":")
        return cls(identity, configuration or None, split or "train", revision or None)


@dataclass(frozen=True, slots=True)
class _State:
    """What is read of state.json, which `save_to_disk` leaves."""

    _fingerprint: str


def find_dataset(name: str) -> tuple[int, str]:
    """Steps of a dataset (the files that the Hub keeps it in, or blocks of rows of a saved one), and its revision: the
    Hub's commit, or the fingerprint that `datasets` gives to a saved one; of another folder, what its files are.

    Raises UserError where it cannot be opened.
    """
    with _told(name):
        revision = _revision(name)
    opened = _open(name, revision)
    steps = -(-len(opened) // ROWS) if is_saved_dataset(Path(name)) else int(opened.num_shards)
    return steps, revision


def step_rows(name: str, revision: str) -> list[float] | None:
    """Rows of each step; of the Hub's, where the dataset's card says how many there are, the mean; None elsewhere.

    Raises UserError where it cannot be opened.
    """
    opened = _open(name, revision)
    if is_saved_dataset(Path(name)):
        return [min(ROWS, len(opened) - start) for start in range(0, len(opened), ROWS)]
    split = (opened.info.splits or {}).get(Name.parse(name).split)
    return [split.num_examples / opened.num_shards] * opened.num_shards if split and split.num_examples else None


def rows(name: str, revision: str, start: int, stop: int, skipped: int = 0) -> Iterator[dict[str, Any]]:
    """The rows of steps `start` to `stop` of that revision, without the first `skipped` of each.

    Raises UserError where they cannot be opened or read.
    """
    opened = _open(name, revision)
    for step in range(start, stop):
        if is_saved_dataset(Path(name)):
            found = opened.select(range(step * ROWS + skipped, min((step + 1) * ROWS, len(opened))))
        else:
            found = opened.shard(num_shards=opened.num_shards, index=step).skip(skipped)
        yield from _readable(found, f"{name}: step {step}", skipped)


def _readable(found: Iterable[dict[str, Any]], place: str, first: int) -> Iterator[dict[str, Any]]:
    """What is read, row by row: `datasets` reads a stretch at a time, so that what is wrong is in a row or after it.

    Raises UserError for whatever is wrong.
    """
    ahead = iter(found)
    for row in itertools.count(first):
        try:
            one = next(ahead)
        except StopIteration:
            return
        except Exception as error:  # of the library, of the formats, of connections: many kinds
            raise UserError(
                f"dataset {place}, row {row} or soon after cannot be read: {_first_line(_cause(error))}. If the Hub "
                "could not be reached, the same command continues. If a file is damaged or one of its rows is bad, "
                "the rest of that file cannot be read, whatever on_bad_document says: mend it, or name a revision that "
                "is right."
            ) from None
        yield one


def _revision(name: str) -> str:
    if is_saved_dataset(Path(name)):
        return str(read_json(Path(name) / "state.json", _State)._fingerprint)
    asked = Name.parse(name)
    if Path(asked.identity).is_dir():
        return _state_of(Path(asked.identity))
    from huggingface_hub import HfApi

    return str(HfApi().dataset_info(asked.identity, revision=asked.revision, token=os.environ.get("HF_TOKEN")).sha)


def _state_of(folder: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(one for one in folder.rglob("*") if one.is_file()):
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            parts = (path.relative_to(folder), status.st_size, status.st_mtime_ns)
            digest.update("\0".join([*map(str, parts), ends_digest(file.fileno(), status.st_size), ""]).encode())
    return digest.hexdigest()


def _open(name: str, revision: str) -> "IterableDataset | Any":
    """The same rows for the same revision, whatever the Hub has had since.

    Once in a process: to open one asks the Hub for several files each time, and what was opened before a fork shares
    its connections. Raises UserError for whatever is wrong.
    """
    with _told(name):
        return _opened(name, revision, os.getpid())


@lru_cache(maxsize=8)
def _opened(name: str, revision: str, process: int) -> "IterableDataset | Any":
    import datasets

    if is_saved_dataset(Path(name)):
        return datasets.load_from_disk(name)
    asked = Name.parse(name)
    pinned = None if Path(asked.identity).is_dir() else revision
    return datasets.load_dataset(
        asked.identity, asked.configuration, split=asked.split, streaming=True, revision=pinned,
        token=os.environ.get("HF_TOKEN"),
    )  # fmt: skip


@contextlib.contextmanager
def _told(name: str) -> Iterator[None]:
    """Raises UserError for whatever is wrong."""
    try:
        yield
    except ImportError:
        raise UserError(f"{name} needs `pip install datasets`.") from None
    except IndexError:
        raise UserError(f"dataset {name} holds no row.") from None
    except Exception as error:  # the library has many kinds, and connection errors of three others
        raise UserError(f"dataset {name} cannot be opened: {_first_line(error)}") from None


def _cause(error: Exception) -> Exception:
    """What an error of `datasets` only wraps."""
    return error.__cause__ if isinstance(error.__cause__, Exception) else error


def _first_line(error: Exception) -> str:
    cause = str(error).splitlines()[0] if str(error) else type(error).__name__
    return f"{type(error).__name__}: {cause}"
