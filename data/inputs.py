"""What `data.paths` names: finished shards, and raw files."""

import difflib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from data import shards
from data.config import path_of
from data.manifest import is_manifest, read_manifest
from data.raw.inputs import source_of
from data.raw.shard_files import WORK_SUFFIX
from program.buckets.names import is_url
from program.errors import UserError, printable
from program.untrusted import InputError, open_regular, read_json

PLAN_BYTES = 1 << 30
"""A plan names each of its inputs, of which there may be millions."""
SHARD_SUFFIXES = (".bin", ".idx")
UNIT_NAME = re.compile(r"(.+)-(\d{5,18})-of-(\d{5,18})(\.idx|\.empty\.json)")
NUMBERED = re.compile(r"(.+)-(\d{5,18})-of-(\d{5,18})")
JOINED_NAME = re.compile(r"_(.+)_document(\.bin|\.idx|\.json)")
"""What Megatron's preprocessing adds to its --output-prefix, and `--merge` to ours: the field of the documents."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """What the name of a numbered shard says."""

    whole: Path
    """The prefix of all of them."""
    index: int
    count: int


@dataclass(frozen=True, slots=True)
class Inputs:
    """`data.paths`, sorted by kind; each kind in the order given."""

    prefixes: tuple[Path, ...]
    raw_files: tuple[str, ...]
    """Paths, and URLs of objects."""


def resolve(paths: tuple[str, ...]) -> Inputs:
    """Tell shard prefixes (`X`, its .bin, .idx or .json; all of `X-00000-of-00012` …; `X_KEY_document`) from raw files.

    What a shell's glob finds of one shard is that shard once. Raises UserError naming the first path that is neither,
    with what lies nearby, and what is named twice.
    """
    prefixes: dict[Path, None] = {}
    raw_files: dict[str, None] = {}
    named = set[str]()
    for name in paths:
        if is_url(name):
            _check_is_read(name)
            raw_files[name] = None
            continue
        path = path_of(name).absolute()
        try:
            found = _resolved(name, path)
        except OSError as error:  # a list that came as one text is too long for a name
            raise UserError(f"data.paths: {name[:100]}: {error.strerror}; expected a file or a prefix.") from None
        if str(path) in raw_files or name in named:
            raise UserError(f"data.paths: {name} is named more than once; each of its documents would train twice.")
        named.add(name)
        prefixes.update(dict.fromkeys(found))
        raw_files.update({} if found else {str(path): None})
    return Inputs(tuple(prefixes), tuple(raw_files))


def _resolved(name: str, path: Path) -> list[Path]:
    """Prefixes of the shards that a name stands for; none where it is a raw file."""
    is_part = path.suffix in SHARD_SUFFIXES or (path.suffix == ".json" and is_manifest(path))
    found = pairs(path.with_suffix("") if is_part else path)
    if not found and is_part and path.suffix == ".json":
        raise UserError(f"data.paths: {name} is a shard's manifest, and its .bin and .idx are not beside it.")
    if not found and not path.is_file():
        raise UserError(_missing(name, path))
    _check_readable([file for one in found for file in _halves(one)])
    if not found:
        _check_is_read(str(path))
    return found


def _check_is_read(path: str) -> None:
    """Before the first of several files is tokenised, which takes hours."""
    try:
        source_of(path)
    except UserError as error:
        raise UserError(f"data.paths: {error}") from None


def pairs(prefix: Path) -> list[Path]:
    """The shards that a prefix stands for: one pair, or what tools.preprocess made for it."""
    if _halves(prefix):
        return [prefix]
    return only(prefix, joined(prefix)) or units(prefix)


def joined(prefix: Path, suffixes: tuple[str, ...] = SHARD_SUFFIXES) -> list[Path]:
    """The pairs `PREFIX_KEY_document` of which one of these files is there, KEY being what --jsonl_key named.

    Of a name alone it is unknown whether `web_en_text_document` is the field `en_text` of `web`, or `text` of
    `web_en`: where a field has a `_`, what tools.preprocess wrote must say that it is this prefix's.
    """
    found = _joined_by_name(prefix, suffixes)
    known = ((one, "_" not in key or key in planned_keys(prefix)) for key, one in found.items())
    return [one for one, is_ours in known if is_ours or _is_made_of(prefix, one)]


def _joined_by_name(prefix: Path, suffixes: tuple[str, ...]) -> dict[str, Path]:
    """By their fields."""
    if not prefix.parent.is_dir():
        return {}
    start, keys = len(prefix.name), set()
    for entry in os.scandir(prefix.parent):
        matched = JOINED_NAME.fullmatch(entry.name, start) if entry.name.startswith(prefix.name) else None
        if matched and matched[2] in suffixes:
            keys.add(matched[1])
    return {key: prefix.with_name(f"{prefix.name}_{key}_document") for key in sorted(keys)}


def only(prefix: Path, found: list[Path]) -> list[Path]:
    """What `joined` found. Raises UserError where several fit."""
    if len(found) > 1:
        raise UserError(
            f"data.paths: {prefix} may be any of {', '.join(one.name for one in found)} in {prefix.parent}; expected "
            "one. Give the whole name of the one that is meant."
        )
    return found


def work_folder(prefix: Path) -> Path:
    """`PREFIX.preprocess`, where tools.preprocess keeps its plan, and what it makes the shards of."""
    return prefix.with_name(prefix.name + WORK_SUFFIX)


@dataclass(frozen=True, slots=True)
class _Joining:
    """What of a plan of tools.preprocess says how joined shards are named."""

    merge: bool
    jsonl_key: str


def planned_keys(prefix: Path) -> tuple[str, ...]:
    """The field that names the joined shards of this prefix by its plan; none where nothing is joined or known."""
    try:
        plan = read_json(work_folder(prefix) / "plan.json", _Joining, PLAN_BYTES)
    except (OSError, InputError):
        return ()
    return (plan.jsonl_key,) if plan.merge else ()


def _is_made_of(prefix: Path, pair: Path) -> bool:
    """Whether a pair's manifest says that it was joined of this prefix's shards."""
    try:
        manifest = read_manifest(pair)
    except UserError:
        return False
    return manifest is not None and any(
        one.startswith(printable(f"{work_folder(prefix).name}/")) for one in manifest.source[:1]
    )


def _halves(prefix: Path) -> list[Path]:
    return [file for file in (shards.bin_path(prefix), shards.idx_path(prefix)) if file.is_file()]


def _check_readable(files: list[Path]) -> None:
    for file in files:
        if not os.access(file, os.R_OK):
            raise UserError(f"data.paths: no permission to read {file}.")


def empty_path(prefix: Path) -> Path:
    """What stands for a unit without any document: `X.empty.json`, its manifest."""
    return prefix.with_name(prefix.name + ".empty.json")


def units(prefix: Path) -> list[Path]:
    """The shards `PREFIX-00000-of-00012` …, in order, without those that are empty; none where there are none.

    Raises UserError where some are missing, or two preprocessings are mixed.
    """
    named = _named_units(prefix.parent, prefix.name).get(prefix.name, {})
    _check_complete(prefix, named)
    full = sorted(key for key, suffix in named.items() if suffix == ".idx")
    return [numbered(prefix, index, count) for index, count in full]


def check_complete(prefixes: Iterable[Path]) -> None:
    """prefixes: of pairs, as a glob finds them. Raises UserError as `units` does where others of a numbered one are
    missing, be they spread over several of its folders.

    Each folder is listed once, however many prefixes' shards it holds.
    """
    wholes: dict[tuple[str, int], set[Path]] = {}
    for prefix in prefixes:
        if numbers := numbers_of(prefix):
            wholes.setdefault((numbers.whole.name, numbers.count), set()).add(prefix.parent)
    listed = {folder: _named_units(folder, "") for folder in set().union(*wholes.values())}
    for (name, count), folders in sorted(wholes.items()):
        held = {
            folder: {key: end for key, end in listed[folder].get(name, {}).items() if key[1] == count}
            for folder in sorted(folders)
        }
        together = {key: end for named in held.values() for key, end in named.items()}
        if len(together) == sum(map(len, held.values())):  # each once: the parts of one corpus
            _check_complete(min(held) / name, together)
        else:
            for folder, named in held.items():
                _check_complete(folder / name, named)


def numbered(prefix: Path, index: int, count: int) -> Path:
    """How tools.preprocess names a shard of a prefix: `X-00000-of-00012`."""
    return prefix.with_name(f"{prefix.name}-{index:05d}-of-{count:05d}")


def numbers_of(prefix: Path) -> Numbers | None:
    """Of a shard `X-00000-of-00012`; None for another name."""
    matched = NUMBERED.fullmatch(prefix.name)
    return Numbers(prefix.with_name(matched[1]), int(matched[2]), int(matched[3])) if matched else None


def _named_units(folder: Path, start: str) -> dict[str, dict[tuple[int, int], str]]:
    """Ends of names by numbers, by the prefix of all. start: how names begin, so that others cost little."""
    found: dict[str, dict[tuple[int, int], str]] = {}
    for entry in os.scandir(folder) if folder.is_dir() else ():
        if entry.name.startswith(start) and (matched := UNIT_NAME.fullmatch(entry.name)):
            found.setdefault(matched[1], {})[int(matched[2]), int(matched[3])] = matched[4]
    return found


def _check_complete(prefix: Path, named: dict[tuple[int, int], str]) -> None:
    """named: what is there of a prefix. Other programs number from 1: then the last one's number is the count."""
    counts = {count for _, count in named}
    check_counts(prefix, counts)
    for count in counts:
        first = 1 if (count, count) in named else 0
        lost = count - sum(index in range(first, first + count) for index, _ in named)
        if lost:  # a name may say that there are billions: they are not counted through
            missing = next(index for index in range(first, first + count) if (index, count) not in named)
            name = numbered(prefix, missing, count).name
            raise UserError(
                f"data.paths: {lost} of the {count} shards of {prefix} are missing, the first {name}.idx: "
                "copy all of them, or give the command of tools.preprocess again to continue it."
            )


def check_counts(prefix: Path, counts: set[int]) -> None:
    """counts: what stands after "of" in the names of a prefix's shards. Raises UserError for several."""
    if len(counts) > 1:
        raise UserError(f"data.paths: {prefix} has shards of {sorted(counts)} parts side by side; remove the old ones.")


def _missing(name: str, path: Path) -> str:
    if path.is_dir():
        return f"data.paths: {name} is a folder; name the files in it, or the prefix of a .bin/.idx pair."
    if path.exists():
        try:
            open_regular(path).close()
        except (OSError, InputError) as error:
            return f"data.paths: {error}"
    if not path.parent.is_dir():
        nearest = next(parent for parent in path.parents if parent.is_dir())
        return f"data.paths: no file or .bin/.idx prefix {name}: of {path.parent}, only {nearest} exists."
    if unsure := [one.name for one in _joined_by_name(path, SHARD_SUFFIXES).values()]:
        return (
            f"data.paths: no file or .bin/.idx prefix {name} in {path.parent}; {', '.join(unsure)} may be another "
            "prefix's: give the whole name if it is meant."
        )
    files = path.parent.iterdir()
    present = {file.stem if file.suffix in SHARD_SUFFIXES else file.name for file in files}
    near = difflib.get_close_matches(path.name, sorted(present), cutoff=0.4)
    hint = f"nearest there: {', '.join(near)}" if near else f"that folder holds {len(present)} other names"
    return f"data.paths: no file or .bin/.idx prefix {name} in {path.parent}; {hint}."
