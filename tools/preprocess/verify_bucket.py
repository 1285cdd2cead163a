"""Shards in a bucket against their manifests: each comes to the disk, is checked, and goes."""

import tempfile
from pathlib import Path

from data import bucket_shards
from data.inputs import NUMBERED, check_counts
from program.buckets import client, names, transfer
from program.errors import UserError
from tools.preprocess import verify as on_disk
from tools.preprocess.verify import ShardDamage


def verify(url: str) -> list[ShardDamage]:
    """As ``tools.preprocess.verify.verify`` of shards on a disk; needs room for the largest one.

    Raises UserError where there is none, or the bucket cannot be read.
    """
    if problem := names.problem(url):
        raise UserError(f"verify: {problem}")
    try:
        shards = bucket_shards.shards_of(url)
        if not shards:
            raise UserError(f"verify: no .bin/.idx shards at {url}.")
        return [*_lost(list(shards)), *(damage for stem in shards for damage in _verify(stem, shards[stem]))]
    except OSError as error:
        raise UserError(f"verify: {error.filename}: {error.strerror}.") from None


def _verify(stem: str, objects: list[client.ObjectFacts]) -> list[ShardDamage]:
    if stem.endswith(".empty"):
        return []
    with tempfile.TemporaryDirectory(prefix="triplane-verify-") as folder:
        prefix = Path(folder) / names.last(stem)
        for one in objects:
            transfer.download(one, prefix.with_name(names.last(one.url)))
        found = on_disk.verify_shards([prefix], [])
        return [ShardDamage(Path(stem), names.in_text(str(prefix), stem, one.what)) for one in found]


def _lost(stems: list[str]) -> list[ShardDamage]:
    matched = [found for one in stems if (found := NUMBERED.fullmatch(one.removesuffix(".empty")))]
    there: dict[str, set[tuple[int, int]]] = {}
    for one in matched:
        there.setdefault(one[1], set()).add((int(one[2]), int(one[3])))
    for prefix, numbers in there.items():
        check_counts(Path(prefix), {count for _, count in numbers})
    return [
        ShardDamage(Path(f"{prefix}-{index:05d}-of-{count:05d}"), f"{prefix}-{index:05d}-of-{count:05d} is missing")
        for prefix, numbers in there.items()
        for count in {count for _, count in numbers}
        for index in range(min(count, on_disk.MOST_LOST))
        if (index, count) not in numbers
    ]
