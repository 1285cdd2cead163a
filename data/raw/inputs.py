"""What INPUT names: files, folders, globs and datasets, in an order that is the same everywhere."""

import glob
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from parallel.errors import UserError

Kind = Literal["jsonl", "text", "parquet", "dataset"]
KINDS: dict[str, Kind] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    **dict.fromkeys((".txt", ".text", ".md", ".rst"), "text"),
    ".parquet": "parquet",
}
COMPRESSIONS = (".gz", ".zst")
SAVED_MARKS = ("dataset_info.json", "state.json", "dataset_dict.json")
"""What `save_to_disk` leaves beside its data: no documents, whatever their ending."""
HUB = "hf://"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class Source:
    """One input file, or one dataset."""

    path: str
    """As it was given, or found in a folder; a dataset's id or folder."""
    kind: Kind
    compression: str
    """".gz", ".zst" or nothing."""
    size: int
    """Bytes on disk; of a dataset, its shards or rows."""
    changed_ns: int = 0
    """Time of the last change."""
    revision: str = ""
    """Of a dataset; what is read stays that one."""


def find(inputs: tuple[str, ...], field: str = "INPUT") -> list[Source]:
    """Everything that `inputs` name, in the order given; folders and globs sorted by name.

    field: what the user gave them as, for messages. Raises UserError for what is not there, is empty, or is given
    twice.
    """
    return [source for sources in find_each(inputs, field).values() for source in sources]


def find_each(inputs: tuple[str, ...], field: str = "INPUT") -> dict[str, list[Source]]:
    """The same, input by input, by their names."""
    try:
        by_input = {one: list(_find(one)) for one in inputs}
        _check(inputs, [source for sources in by_input.values() for source in sources])
    except UserError as error:
        raise UserError(f"{field}: {error}") from None
    return by_input


def _check(inputs: tuple[str, ...], found: list[Source]) -> None:
    twice = [name for name, count in Counter(inputs).items() if count > 1]
    twice += [path for path, count in Counter(source.path for source in found).items() if count > 1]
    if twice:
        raise UserError(f"{twice[0]} is named more than once; each of its documents would be, too.")
    if not any(source.size for source in found):
        raise UserError(f"empty: {len(found)} file(s) with 0 bytes in {', '.join(inputs)}.")


def _find(name: str) -> Iterator[Source]:
    path = Path(name).expanduser()
    if path.is_file():
        yield _file(path)
    elif path.is_dir():
        yield from _saved(name, path) or _folder(path)
    elif name.startswith(HUB):
        yield _dataset(name.removeprefix(HUB))
    elif glob.has_magic(name):
        paths = sorted(filter(Path.is_file, map(Path, glob.glob(str(path), recursive=True))))  # noqa: PTH207  absolute too
        if not paths:
            raise UserError(f"no file fits {name}.")
        yield from map(_file, paths)
    elif HUB_ID.fullmatch(name) and not path.parent.exists() and _kind(path)[0] is None:
        yield _dataset(name)
    else:
        raise UserError(
            f"no file, folder or glob {name}; {path.parent} {'exists' if path.parent.is_dir() else 'does not'}. "
            f"A dataset of the Hugging Face Hub is named {HUB}OWNER/NAME."
        )


def _kind(path: Path) -> tuple[Kind | None, str]:
    compression = path.suffix if path.suffix in COMPRESSIONS else ""
    return KINDS.get(Path(path.stem if compression else path.name).suffix.lower()), compression


def _file(path: Path) -> Source:
    kind, compression = _kind(path)
    if not os.access(path, os.R_OK):
        raise UserError(f"no permission to read {path}.")
    if path.name in SAVED_MARKS and (is_saved_dataset(path.parent) or _is_saved_dict(path.parent)):
        raise UserError(f"{path} is of a saved dataset, not documents; expected its folder: give {path.parent}.")
    if kind == "parquet" and compression:
        raise UserError(f"{path}: parquet is compressed inside; unpack the file first.")
    status = path.stat()
    return Source(str(path), kind or "text", compression, status.st_size, status.st_mtime_ns)


def _folder(folder: Path) -> Iterator[Source]:
    """The files of known endings and the saved datasets below a folder; where other programs hide theirs (names with
    a dot) are none.
    """
    found = list(_walk(folder))
    files = [one for one in found if isinstance(one, Path)]
    known = [one for one in found if isinstance(one, Source) or _kind(one)[0] is not None]
    if not known:
        endings = Counter(path.suffix for path in files).most_common(3)
        held = ", ".join(f"{count} {ending or 'without ending'}" for ending, count in endings) or "none"
        raise UserError(
            f"folder {folder} holds no {', '.join(KINDS)} files (also with {', '.join(COMPRESSIONS)}); files "
            f"there: {held}. Other endings are read as text where a glob names them: '{folder}/**/*.py'."
        )
    for one in known:
        yield one if isinstance(one, Source) else _file(one)


def _walk(folder: Path) -> Iterator[Path | Source]:
    """Files, and in the place of its files what is a saved dataset. A folder's files come before its folders."""
    for parent, folders, names in os.walk(folder, onerror=_unreadable):
        if saved := _saved(parent, Path(parent)):
            folders.clear()
            yield from saved
            continue
        _check_no_torn_dataset(parent, names)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(parent, name) for name in sorted(names) if not name.startswith("."))


def _check_no_torn_dataset(folder: str, names: list[str]) -> None:
    """The .json files of a dataset that is not whole, or of the cache of `datasets`, are no documents either."""
    marks = [name for name in SAVED_MARKS if name in names]
    if marks and any(name.endswith(".arrow") for name in names):
        raise UserError(
            f"{folder} holds {', '.join(marks)} and .arrow files; expected also "
            f"{', '.join(name for name in SAVED_MARKS[:2] if name not in names)}, as save_to_disk leaves them. Copy or "
            "save that dataset again, or move it out of the inputs."
        )


def _unreadable(error: OSError) -> None:
    raise UserError(f"{error.filename}: {error.strerror}.")


def _saved(name: str, folder: Path) -> list[Source]:
    """What `save_to_disk` left in a folder: a dataset, or several of which only one can be taken; else nothing."""
    if is_saved_dataset(folder):
        return [_dataset(name)]
    if not _is_saved_dict(folder):
        return []
    splits = sorted(one.name for one in folder.iterdir() if is_saved_dataset(one))
    if splits == ["train"]:
        return [_dataset(str(folder / "train"))]
    raise UserError(
        f"{name} is a saved DatasetDict with the splits {', '.join(splits) or '(none is there)'}; expected one "
        f"dataset. Give the folder of a split: {folder / (splits[0] if splits else 'SPLIT')}."
    )


def unpinned(name: str) -> str:
    """What names a dataset without the revision that it was asked for in: `hf://OWNER/NAME#REVISION`."""
    return name if Path(name).exists() else name.partition("#")[0]


def is_saved_dataset(folder: Path) -> bool:
    """What `Dataset.save_to_disk` leaves."""
    return (folder / "dataset_info.json").is_file() and (folder / "state.json").is_file()


def _is_saved_dict(folder: Path) -> bool:
    """What `DatasetDict.save_to_disk` leaves; its datasets are in folders there."""
    return (folder / "dataset_dict.json").is_file()


def _dataset(name: str) -> Source:
    from data.raw import hub

    steps, revision = hub.look(name)
    return Source(unpinned(name), "dataset", "", steps, revision=revision)
