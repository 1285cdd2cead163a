"""Shards in a bucket against their manifests: each comes to the disk, is checked, and goes."""

import tempfile
from pathlib import Path

from data import bucket_shards
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
        lost = on_disk.lost_of({Path(one.removesuffix(".empty")) for one in shards})
        missing = [ShardDamage(one, f"{names.of_path(one)} is missing") for one in lost]
        return [*missing, *(damage for stem in shards for damage in _verify(stem, shards[stem]))]
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
        return [ShardDamage(Path(stem), one.what.replace(str(prefix), stem)) for one in found]
