"""What INPUT names: files, folders, globs and datasets, in an order that is the same everywhere."""

import glob
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from data.config import path_of
from data.raw import bucket_inputs, compressed, hub
from data.raw.format import ENDINGS, ending_of, format_in
from data.raw.input_file import InputFacts, InputSource, facts_of, open_input
from data.raw.shard_files import is_made, is_shard_file, is_work_folder
from program.buckets.names import is_url
from program.errors import UserError
from program.untrusted import open_regular

KNOWN = tuple(ENDINGS)
COLUMNS = tuple(ending for ending, kind in ENDINGS.items() if kind in ("csv", "tsv"))
"""Endings of files that are taken of a folder only where csv_column says what is a document in them."""
SAVED_MARKS = ("dataset_info.json", "state.json", "dataset_dict.json")
"""What `save_to_disk` leaves beside its data: no documents, whatever their ending."""
HUB = "hf://"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def find(
    inputs: tuple[str, ...],
    field: str = "INPUT",
    say: Callable[[str], None] | None = None,
    csv_column: str | None = None,
) -> list[InputSource]:
    """Everything that `inputs` name, in the order given; folders and globs sorted by name.

    field: what the user gave them as, for messages. say: gets what is skipped, as lines. csv_column: without it, the
    csv and tsv files of folders are skipped. Raises UserError for what is missing, is empty, or is given twice.
    """
    return [source for sources in find_each(inputs, field, say, csv_column).values() for source in sources]


def find_each(
    inputs: tuple[str, ...],
    field: str = "INPUT",
    say: Callable[[str], None] | None = None,
    csv_column: str | None = None,
) -> dict[str, list[InputSource]]:
    """The same, input by input, by their names."""
    left_out: Counter[str] = Counter()
    taken = KNOWN if csv_column else tuple(ending for ending in KNOWN if ending not in COLUMNS)
    places, flags = Places(), "--" if field == "INPUT" else "data."
    try:
        documents = _without_shards(inputs, say)
        by_input = {one: _once(_find(one, left_out, taken, flags), places) for one in documents}
        _check(documents, [source for sources in by_input.values() for source in sources], places)
    except UserError as error:
        raise UserError(f"{field}: {error}") from None
    except OSError as error:  # a name that is too long for one, links in a circle, a disk that fails
        raise UserError(f"{field}: {str(error.filename)[:200]}: {error.strerror}.") from None
    if say and left_out:
        counts = ", ".join(f"{count} {ending or 'without ending'}" for ending, count in left_out.most_common())
        say(
            f"{field}: {left_out.total()} file(s) in folders are left out, of endings that are not known: {counts}. "
            f"Unpack what is packed; what a glob names is read as text{_columns_way(left_out, flags)}"
        )
    return by_input


def _columns_way(left_out: Iterable[str], flags: str) -> str:
    has_columns = any(ending_of(Path(f"x{ending}")) in COLUMNS for ending in left_out)
    return f"; {' and '.join(COLUMNS)} files are read where {flags}csv_column names a column" if has_columns else ""


def _without_shards(inputs: tuple[str, ...], say: Callable[[str], None] | None) -> tuple[str, ...]:
    """Where a shell's glob names the inputs, it names the shards that are there when the command is given again.

    Raises UserError where nothing else is named, or where there is no ``say`` to report it to.
    """
    shards = [one for one in inputs if is_made(path_of(one))]
    if shards and (say is None or len(shards) == len(inputs)):
        raise UserError(f"{shards[0]} is of token shards, or of the work of tools.preprocess; expected documents.")
    if say and shards:
        say(f"{len(shards)} of the inputs named are left out, as they are of token shards: {shards[0]} …")
    named = set(shards)
    return tuple(one for one in inputs if one not in named)


class Places:
    """Where files are, whatever links lead there. A folder is resolved once for all of its files: each part of a path
    is asked for, and there may be a million."""

    def __init__(self) -> None:
        self._folders: dict[str, str] = {}

    def real_path(self, source: InputSource) -> str:
        """A source without symbolic links; of a dataset of the Hub, its name."""
        is_hubs = source.kind == "dataset" and not Path(source.path).exists()
        return source.path if is_hubs or is_url(source.path) else self.at(source.path)

    def at(self, path: str) -> str:
        """Of one path."""
        if os.path.islink(path):  # noqa: PTH114  a Path of each would take as long again
            return os.path.realpath(path)
        folder, name = os.path.split(path)
        if folder not in self._folders:
            self._folders[folder] = os.path.realpath(folder)
        return f"{self._folders[folder]}/{name}"


def _once(found: Iterable[InputSource], places: Places) -> list[InputSource]:
    """What links within a folder lead to as well is read once, under the name that comes first."""
    by_place: dict[str, InputSource] = {}
    for source in found:
        by_place.setdefault(places.real_path(source), source)
    return list(by_place.values())


def _check(inputs: tuple[str, ...], found: list[InputSource], places: Places) -> None:
    _check_each_is_another((name if is_url(name) else os.path.realpath(path_of(name)), name) for name in inputs)
    _check_each_is_another((places.real_path(source), source.path) for source in found)
    if not any(source.size for source in found):
        raise UserError(f"empty: {len(found)} file(s) with 0 bytes in {', '.join(inputs)}.")


def _check_each_is_another(named: Iterable[tuple[str, str]]) -> None:
    """named: places, and the names that lead there."""
    found: dict[str, str] = {}
    for place, name in named:
        if place in found:
            other = f", as {found[place]} too" if found[place] != name else ""
            raise UserError(f"{name} is named more than once{other}; each of its documents would be, too.")
        found[place] = name


def _find(name: str, left_out: Counter[str], taken: tuple[str, ...], flags: str) -> Iterator[InputSource]:
    """left_out: gets the endings of the files that a folder holds beside those that are found. taken: endings of these
    in a folder. flags: what stands before names that a user sets, for messages.
    """
    path = path_of(name)
    if is_url(name):
        yield from _objects(name, left_out, taken, flags)
    elif not name:
        raise UserError("an empty name, as of a variable that is not set; expected a file, folder, glob or dataset.")
    elif path.is_file():
        yield file_source(path)
    elif path.is_dir():
        yield from _saved(name, path) or _folder(path, left_out, taken, flags)
    elif name.startswith(HUB):
        yield _dataset(name.removeprefix(HUB))
    elif glob.has_magic(name):
        yield from map(file_source, _globbed(name, path))
    elif HUB_ID.fullmatch(name) and not path.is_symlink() and not path.parent.exists() and ending_of(path) not in KNOWN:
        yield _dataset(name)
    else:
        _check_leads_somewhere(path)
        if path.exists():
            open_regular(path).close()  # says what it is
        raise UserError(
            f"no file, folder or glob {name}; {path.parent} {'exists' if path.parent.is_dir() else 'does not'}. "
            f"A dataset of the Hugging Face Hub is named {HUB}OWNER/NAME."
        )


def _globbed(name: str, path: Path) -> list[Path]:
    found = sorted(map(Path, glob.glob(str(path), recursive=True)))  # noqa: PTH207  absolute too
    for one in found:
        _check_leads_somewhere(one)
    made = {folder for folder in {one.parent for one in found} if is_made(folder)}  # once for all of its files
    files = [one for one in found if one.is_file() and one.parent not in made and not is_shard_file(one)]
    if not files:
        raise UserError(f"no file fits {name}.")
    return files


def _check_leads_somewhere(path: Path) -> None:
    """It is unknown how much is missing behind a dangling link: it may have been a folder."""
    if not path.is_symlink():
        return
    try:
        path.stat()
    except OSError as error:
        raise UserError(
            f"{path} is a link to {path.readlink()}, which cannot be reached ({error.strerror}). Copy or mount what it "
            "points to, or remove the link."
        ) from None


def file_source(path: Path) -> InputSource:
    """A file, known by its content. Raises UserError for what holds no documents that can be read."""
    if not os.access(path, os.R_OK):
        _check_leads_somewhere(path)
        raise UserError(f"no permission to read {path}.")
    if path.name in SAVED_MARKS and (hub.is_saved_dataset(path.parent) or _is_saved_dict(path.parent)):
        raise UserError(f"{path} is of a saved dataset, not documents; expected its folder: give {path.parent}.")
    return _by_content(str(path))


def source_of(path: str) -> InputSource:
    """A file or an object, known by its content. Raises UserError as ``file_source``."""
    return _by_content(path) if is_url(path) else file_source(Path(path))


def _by_content(path: str, expected: InputFacts | None = None) -> InputSource:
    with open_input(path, expected) as file:
        facts = facts_of(file)
        try:
            found = format_in(file, Path(path))
        except UserError as error:
            raise UserError(str(error).replace(str(Path(path)), path)) from None
        if found.kind == "json" or found.kind == "binary":
            raise UserError(f"{path}: found {found.what}")
        if found.kind == "parquet" and found.compression:
            raise UserError(f"{path}: parquet is compressed inside; unpack the file first.")
    return InputSource(path, found.kind, found.compression, *facts)


def _folder(folder: Path, left_out: Counter[str], taken: tuple[str, ...], flags: str) -> Iterator[InputSource]:
    """The files of the endings `taken` and the saved datasets below a folder; where other programs hide theirs (names
    with a dot) are none, nor are token shards, as those of a preprocessing that writes there.
    """
    found = list(_walk(folder))
    files = [one for one in found if isinstance(one, Path)]
    others = [path for path in files if ending_of(path) not in taken]
    for path in others:
        _check_leads_somewhere(path)
    if len(others) == len(found):
        raise _nothing_known(str(folder), files, taken, flags)
    left_out.update(_ending(path) for path in others if path.suffix or not path.name.isupper())
    for one in found:
        if isinstance(one, InputSource):
            yield one
        elif ending_of(one) in taken:
            yield file_source(one)


def _objects(name: str, left_out: Counter[str], taken: tuple[str, ...], flags: str) -> Iterator[InputSource]:
    """As of a folder, a glob or a file, in a bucket."""
    found, is_folder = bucket_inputs.find(name)
    files = [Path(one.url) for one in found]
    others = {path for path in files if is_folder and ending_of(path) not in taken}
    if len(others) == len(files):
        raise _nothing_known(name, files, taken, flags)
    left_out.update(map(_ending, others))
    for one in (one for one, path in zip(found, files, strict=True) if path not in others):
        yield _by_content(one.url, InputFacts(one.size, one.changed_ns, one.etag))


def _nothing_known(folder: str, files: Sequence[Path], taken: tuple[str, ...], flags: str) -> UserError:
    endings = Counter(path.suffix for path in files).most_common(3)
    held = ", ".join(f"{count} {ending or 'without ending'}" for ending, count in endings) or "none"
    return UserError(
        f"folder {folder} holds no {', '.join(taken)} files (also with {', '.join(compressed.ENDINGS)}); "
        f"files there: {held}{_columns_way(map(_ending, files), flags)}. Other endings are read as text where a glob "
        f"names them: '{folder}/**/*.py'."
    )


def _ending(path: Path) -> str:
    """`.jsonl.lz4` of what is packed in a way that is not known."""
    return Path(path.stem).suffix + path.suffix if ending_of(Path(path.stem)) in KNOWN else path.suffix


def _walk(folder: Path) -> Iterator[Path | InputSource]:
    """Files, and in the place of its files what is a saved dataset. A folder's files come before its folders."""
    seen = {os.path.realpath(folder)}
    for parent, folders, names in os.walk(folder, onerror=_unreadable, followlinks=True):
        if saved := _saved(parent, Path(parent)):
            folders.clear()
            yield from saved
            continue
        _check_no_torn_dataset(parent, names)
        folders[:] = _to_visit(parent, folders, seen)
        files = [Path(parent, name) for name in sorted(names) if not name.startswith(".")]
        yield from (path for path in files if not is_shard_file(path))


def _to_visit(parent: str, names: list[str], seen: set[str]) -> list[str]:
    """The folders of a folder that are gone into, sorted: each place once, whatever links lead there, and no link to a
    folder that it lies in, which would have no end. seen: gets the places.
    """
    chosen, here = [], Path(os.path.realpath(parent))
    visible = (name for name in names if not name.startswith("."))
    for name in sorted(visible, key=lambda name: (Path(parent, name).is_symlink(), name)):
        path = Path(parent, name)
        place = os.path.realpath(path)
        if here.is_relative_to(place) or place in seen or is_work_folder(path):
            continue
        seen.add(place)
        chosen.append(name)
    return sorted(chosen)


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


def _saved(name: str, folder: Path) -> list[InputSource]:
    """What `save_to_disk` left in a folder: a dataset, or several of which only one can be taken; else nothing."""
    if hub.is_saved_dataset(folder):
        return [_dataset(name)]
    if not _is_saved_dict(folder):
        return []
    splits = sorted(one.name for one in folder.iterdir() if hub.is_saved_dataset(one))
    if splits == ["train"]:
        return [_dataset(str(folder / "train"))]
    raise UserError(
        f"{name} is a saved DatasetDict with the splits {', '.join(splits) or '(none is there)'}; expected one "
        f"dataset. Give the folder of a split: {folder / (splits[0] if splits else 'SPLIT')}."
    )


def _unpinned(name: str) -> str:
    """What names a dataset without the revision that it was asked for in: `hf://OWNER/NAME#REVISION`."""
    return name if Path(name).exists() else name.partition("#")[0]


def _is_saved_dict(folder: Path) -> bool:
    """What `DatasetDict.save_to_disk` leaves; its datasets are in folders there."""
    return (folder / "dataset_dict.json").is_file()


def _dataset(name: str) -> InputSource:
    steps, revision = hub.find_dataset(name)
    return InputSource(_unpinned(name), "dataset", "", steps, revision=revision)
