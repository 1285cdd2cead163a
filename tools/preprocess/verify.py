"""Whether shards are what was written: every byte against the checksums in their manifests."""

import functools
import os
import re
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from data import bucket_shards
from data.config import path_of
from data.inputs import SHARD_SUFFIXES, Numbers, check_counts, joined, numbered, numbers_of, only, resolve, work_folder
from data.manifest import FileSum, damaged_blocks, is_manifest, manifest_path, read_manifest
from data.shards import Shard, bin_path, idx_path
from program.buckets import names, transfer
from program.buckets.names import is_url
from program.errors import UserError
from tools.preprocess import worker_pool

OURS = re.compile(r"-\d{5,18}-of-\d{5,18}$|_document$")
"""How the names of shards end."""
FILES = {"bin": bin_path, "idx": idx_path}
"""What manifests have checksums of."""
MOST_LOST = 100_000
"""Shards that are listed as lost: a name may say that there are billions."""
EMPTY = ".empty.json"
"""What stands for a shard without any document."""


@dataclass(frozen=True, slots=True)
class ShardDamage:
    """What is damaged or lost."""

    prefix: Path
    """Of the shard."""
    what: str
    """File and range."""


def verify(path: str | Path) -> list[ShardDamage]:
    """What is damaged or lost. path: a prefix, one shard, or a folder of shards; of those in a bucket one after another
    comes to the disk, which needs room for the largest.

    Raises UserError where there is no shard, or what may not be read.
    """
    try:
        if is_url(str(path)):
            return _verify_bucket(str(path))
        prefixes, lost = _expected(path_of(path))
        for prefix in prefixes:
            _check_readable(prefix)
    except OSError as error:
        raise UserError(f"verify: {error.filename or path}: {error.strerror}.") from None
    return _verify_shards(prefixes, lost)


def _verify_bucket(url: str) -> list[ShardDamage]:
    if problem := names.problem(url):
        raise UserError(f"verify: {problem}")
    shards = bucket_shards.shards_of(url)
    if not shards:
        raise UserError(f"verify: no .bin/.idx shards at {url}.")
    lost = _lost_of({Path(one.removesuffix(".empty")) for one in shards})
    found = [ShardDamage(one, f"{names.of_path(one)} is missing") for one in lost]
    for stem in (one for one in shards if not one.endswith(".empty")):
        with tempfile.TemporaryDirectory(prefix="triplane-verify-") as folder:
            prefix = Path(folder) / names.last(stem)
            for one in shards[stem]:
                transfer.download(one, prefix.with_name(names.last(one.url)))
            damage = _verify_shards([prefix], [])
            found += [ShardDamage(Path(stem), one.what.replace(str(prefix), stem)) for one in damage]
    return found


def _verify_shards(prefixes: list[Path], lost: list[Path]) -> list[ShardDamage]:
    """What is damaged of shards, and that others are lost."""
    found = [ShardDamage(one, f"{one}.bin, .idx and .json are missing: lost, or not made yet") for one in lost]
    checked: list[tuple[Path, Path, FileSum]] = []
    without: list[Path] = []
    for prefix in prefixes:
        try:
            manifest = read_manifest(prefix)
            shard = Shard(prefix, check_ends=False)  # damage is reported by range
            if manifest is None:
                shard.check_index()  # nothing else tells whether its middle is right
        except (UserError, OSError) as error:
            found.append(ShardDamage(prefix, str(error).removeprefix("data: ")))
            continue
        if manifest is None:
            without.append(prefix)
        else:
            checked += [(prefix, file(prefix), manifest.files[name]) for name, file in FILES.items()]
    lost_manifests = _lost_manifests(without)
    found += lost_manifests
    with worker_pool.progress(sum(one.size for *_, one in checked), "reading") as bar:
        for prefix, file, expected in checked:
            try:
                found += [ShardDamage(prefix, what) for what in damaged_blocks(file, expected, bar.update)]
            except OSError as error:
                found.append(ShardDamage(prefix, f"{file}: cannot be read: {error.strerror}"))
    if unknown := len(without) - len(lost_manifests):
        print(f"{unknown} of {len(prefixes)} shards have no manifest: their sizes are right, their content is unknown")
    return found


def how_to_fix(found: list[ShardDamage]) -> str:
    """What to do about findings: the command that made shards makes them again, if only they are missing."""
    ours = sorted({str(work.with_suffix("")) for one in found if (work := _work_of(one.prefix))})
    again = (
        "Remove the .bin, .idx and .json of each shard that is named, and give the command again that made "
        f"{', '.join(ours)}: it makes what is missing."
    )
    elsewhere = "Copy the .bin, .idx and .json of each shard that is named again, or tokenise again."
    return "\n".join([again] * bool(ours) + [elsewhere] * any(_work_of(one.prefix) is None for one in found))


def _work_of(prefix: Path) -> Path | None:
    """The folder of the work that a shard is of, where it is there: by the shard's name."""
    if numbers := numbers_of(prefix):
        work = work_folder(numbers.whole)
        return work if work.is_dir() else None
    words = prefix.name.split("_")
    wholes = [prefix.with_name("_".join(words[:count])) for count in range(len(words) - 2, 0, -1)]
    return next((work for one in wholes if (work := work_folder(one)).is_dir() and prefix in joined(one)), None)


def _lost_manifests(without: list[Path]) -> list[ShardDamage]:
    """Of shards without a manifest, those that had one; shards of Megatron have none."""
    sign_of = functools.cache(_sign_of_manifests)  # a prefix may have thousands of shards
    families = ((one, numbers_of(one) or Numbers(one, 0, 0)) for one in without)
    signs = ((one, sign_of(numbers.whole, numbers.count)) for one, numbers in families)
    return [
        ShardDamage(one, f"{manifest_path(one)} is missing: lost, as {sign.name} is there")
        for one, sign in signs
        if sign
    ]


def _sign_of_manifests(whole: Path, count: int) -> Path | None:
    """What is there only where shards had manifests: the manifest of one of `count`, or the folder of the work."""
    if not count:
        return _work_of(whole)
    for file in sorted(whole.parent.glob("*.json")):
        prefix = file.with_name(file.name.removesuffix(".json").removesuffix(".empty"))
        numbers = numbers_of(prefix)
        is_one = numbers is not None and (numbers.whole, numbers.count) == (whole, count)
        if is_one and (file.name.endswith(EMPTY) or is_manifest(file)):
            return file
    return _work_of(numbered(whole, 0, count))


def _check_readable(prefix: Path) -> None:
    for file in (bin_path(prefix), idx_path(prefix), manifest_path(prefix)):
        if file.exists() and not os.access(file, os.R_OK):
            raise UserError(f"verify: no permission to read {file}.")


def _expected(path: Path) -> tuple[list[Path], list[Path]]:
    """The shards that something is there of, and those of which the names of others tell that they are lost.

    Raises UserError where neither is.
    """
    if path.is_dir():
        found, lost = _present(path)
    else:
        found, lost = _expected_of(path)
    if not found and not lost:
        resolve((str(path),))  # says what lies nearby where there is nothing at all
        raise UserError(f"verify: no .bin/.idx shards at {path}.")
    return found, lost


def _expected_of(path: Path) -> tuple[list[Path], list[Path]]:
    """Of a prefix, or of one shard. What data.paths opens, and what it would if nothing were lost."""
    prefix = (path.with_suffix("") if path.suffix in SHARD_SUFFIXES else path).absolute()
    numbers = numbers_of(prefix)
    start = numbers.whole.name if numbers else prefix.name
    there, lost = _present(prefix.parent, start) if prefix.parent.is_dir() else ([], [])
    if prefix in there or prefix in lost:
        return [one for one in there if one == prefix], [one for one in lost if one == prefix]
    if bin_path(prefix).is_file():
        return [prefix], []
    if pair := only(prefix, [one for one in joined(prefix, (*SHARD_SUFFIXES, ".json")) if one in there]):
        return pair, []
    named = {one: numbers for one in (*there, *lost) if (numbers := numbers_of(one)) and numbers.whole == prefix}
    check_counts(prefix, {numbers.count for numbers in named.values()})
    return [one for one in there if one in named], [one for one in lost if one in named]


def _present(folder: Path, start: str = "") -> tuple[list[Path], list[Path]]:
    """The shards of a folder that something is there of; those that are lost. start: how their names begin."""
    files = [one for one in folder.iterdir() if one.name.startswith(start)]
    found = {prefix for one in files if (prefix := _prefix(one)) is not None}
    empty = {one.with_name(one.name.removesuffix(EMPTY)) for one in files if one.name.endswith(EMPTY)}
    return sorted(found), _lost_of(found | empty)


def _lost_of(there: set[Path]) -> list[Path]:
    """The shards that others by their `-of-00012` say should be there; none of a prefix whose shards were joined."""
    present: dict[tuple[Path, int], set[int]] = defaultdict(set)
    for numbers in filter(None, map(numbers_of, there)):
        present[numbers.whole, numbers.count].add(numbers.index)
    for (whole, count), indices in present.items():
        if count - len(indices) > MOST_LOST:
            one = numbered(whole, min(indices), count)
            raise UserError(
                f"verify: {one} is one of {count} by its name, and {len(indices)} are there: too many are missing "
                "to name them. Rename it if its name is wrong, or verify single shards."
            )
    return [
        numbered(whole, index, count)
        for (whole, count), indices in sorted(present.items())
        if not joined(whole)
        for index in range(count)
        if index not in indices
    ]


def _prefix(file: Path) -> Path | None:
    """Of the shard that a file of a folder belongs to; None where it belongs to none.

    The rest of a shard shows that it was there: an index, tokens beside their manifest, or one of these by a name
    as this program gives. Other .bin and .json files may be anything.
    """
    prefix = file.with_name(file.name.removesuffix(file.suffix))
    is_named, is_pair = OURS.search(prefix.name), bin_path(prefix).is_file() and manifest_path(prefix).is_file()
    if file.suffix == ".bin":
        return prefix if is_named or is_pair else None
    if file.suffix == ".json":
        return prefix if is_pair or (is_named and is_manifest(file)) else None
    return prefix if file.suffix == ".idx" else None
