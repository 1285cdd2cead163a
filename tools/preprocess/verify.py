"""Whether shards are what was written: every byte against the checksums in their manifests."""

import re
from pathlib import Path

from data.inputs import resolve
from data.manifest import FileSum, damaged_blocks, manifest_path, read_manifest
from data.shards import Shard, bin_path, idx_path
from parallel.errors import UserError
from tools.preprocess import crew

OURS = re.compile(r"-\d{5,}-of-\d{5,}$|_document$")
"""How the names of shards end."""


def verify(path: Path) -> list[str]:
    """What is damaged, a line each: file and range. path: a prefix, one shard, or a folder of shards.

    Raises UserError where there is no shard.
    """
    prefixes = _prefixes(path)
    damages: list[str] = []
    checked: list[tuple[Path, FileSum]] = []
    unknown = 0
    for prefix in prefixes:
        try:
            manifest = read_manifest(prefix)
            Shard(prefix, check_ends=False)  # what they would tell is told by range
        except UserError as error:
            damages.append(str(error).removeprefix("data: "))
            continue
        if manifest is None:
            unknown += 1
        else:
            checked += [(bin_path(prefix), manifest.files["bin"]), (idx_path(prefix), manifest.files["idx"])]
    with crew.progress(sum(one.size for _, one in checked), "reading") as bar:
        for file, expected in checked:
            damages += damaged_blocks(file, expected, bar.update)
    if unknown:
        print(f"{unknown} of {len(prefixes)} shards have no manifest: their sizes are right, their content is unknown")
    return damages


def _prefixes(path: Path) -> list[Path]:
    if not path.is_dir():
        found = list(resolve((str(path),)).prefixes)
    else:
        found = sorted({prefix for one in path.iterdir() if (prefix := _prefix(one)) is not None})
    if not found:
        raise UserError(f"verify: no .bin/.idx shards at {path}.")
    return found


def _prefix(file: Path) -> Path | None:
    """Of the shard that a file of a folder belongs to; None where it belongs to none.

    What is left of a shard tells that it was there: an index, tokens beside their manifest, or one of these by a name
    as this program gives. Other .bin and .json files may be anything.
    """
    prefix = file.with_name(file.name.removesuffix(file.suffix))
    is_named, is_pair = OURS.search(prefix.name), bin_path(prefix).is_file() and manifest_path(prefix).is_file()
    if file.suffix == ".bin":
        return prefix if is_named or is_pair else None
    if file.suffix == ".json":
        return prefix if is_pair or (is_named and _is_manifest(prefix)) else None
    return prefix if file.suffix == ".idx" else None


def _is_manifest(prefix: Path) -> bool:
    """Raw inputs may be named like shards: `train-00000-of-00002.json`."""
    try:
        return read_manifest(prefix) is not None
    except UserError:
        return False
