"""Whether shards are what was written: every byte against the checksums in their manifests."""

from pathlib import Path

from data.inputs import resolve
from data.manifest import FileSum, damaged_blocks
from data.shards import Shard, bin_path, idx_path
from parallel.errors import UserError
from tools.preprocess import crew


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
            shard = Shard(prefix)
        except UserError as error:
            damages.append(str(error).removeprefix("data: "))
            continue
        if shard.manifest is None:
            unknown += 1
        else:
            checked += [
                (bin_path(prefix), shard.manifest.files["bin"]),
                (idx_path(prefix), shard.manifest.files["idx"]),
            ]
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
        found = sorted(one.with_name(one.name.removesuffix(".idx")) for one in path.glob("*.idx"))
    if not found:
        raise UserError(f"verify: no .bin/.idx shards at {path}.")
    return found
