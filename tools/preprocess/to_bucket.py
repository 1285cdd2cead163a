"""Shards into a bucket: made on this machine's disk, and moved there when they are whole, each manifest last.

A folder on a disk keeps the work, so that a killed command goes on where it was; `X.json.uploaded` there marks a shard
that is in the bucket already. When all is there, the folder goes.
"""

import hashlib
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

import platformdirs

from data.bucket_shards import is_of, stem
from data.inputs import check_complete, work_folder
from data.shards import bin_path, idx_path
from program.buckets import client, names, transfer
from program.errors import UserError
from tools.preprocess import worker_pool

UPLOADED = ".uploaded"


def make(url: str, work_dir: Path | None, overwrite: bool, preprocess: Callable[[Path], None]) -> None:
    """Run ``preprocess`` with a prefix on a disk, and move what it made to ``url``. Parts of a SLURM array that share
    ``work_dir`` or have one each move what they have made.

    Raises UserError where the bucket cannot be written, before anything is read, or holds shards of that prefix from
    other work; and what ``preprocess`` raises.
    """
    if problem := names.problem(url):
        raise UserError(f"--output {problem}")
    folder = work_dir or Path(platformdirs.user_cache_dir("triplane")) / "preprocess" / _digest(url)
    prefix = folder.absolute() / names.last(url)
    try:
        _check_writable(url)
        if not overwrite and not work_folder(prefix).is_dir() and (there := _there(url)):
            raise UserError(f"--output {url}: {there[0]} is there already. Give another prefix, or --overwrite.")
        folder.mkdir(parents=True, exist_ok=True)
        preprocess(prefix)
        if overwrite and not list(folder.glob(f"*{UPLOADED}")):
            client.remove(sorted(_there(url), key=lambda one: not one.endswith(".json")))
        _upload(prefix, url)
    except OSError as error:
        raise UserError(f"--output {url}: {error.filename}: {error.strerror}.") from None


def _upload(prefix: Path, url: str) -> None:
    manifests = sorted(prefix.parent.glob("*.json"))
    new = [one for one in manifests if not one.with_name(one.name + UPLOADED).exists()]
    files = [file for one in new for file in _files(one)]
    with worker_pool.progress(sum(file.stat().st_size for file in files), "uploading") as bar:
        for manifest in new:
            for file in _files(manifest):
                transfer.upload(file, names.joined(names.parent(url), file.name), bar.update)
            manifest.with_name(manifest.name + UPLOADED).touch()
    print(f"{len(new)} shard(s) are now at {url}")
    try:
        check_complete(one.with_name(one.name.removesuffix(".json").removesuffix(".empty")) for one in manifests)
    except UserError:  # other parts' are to come
        print(f"the others will be there when their parts are done; this part's stay in {prefix.parent}")
        return
    shutil.rmtree(prefix.parent)


def _files(manifest: Path) -> list[Path]:
    """Of a shard; its manifest last."""
    prefix = manifest.with_name(manifest.name.removesuffix(".json"))
    return [*(file for file in (bin_path(prefix), idx_path(prefix)) if file.exists()), manifest]


def _there(url: str) -> list[str]:
    """Objects of shards of a prefix."""
    found = [one.url for one in client.listed(url)]
    return [one for one in found if (shard := stem(one)) != one and is_of(shard, url)]


def _check_writable(url: str) -> None:
    """Now, not after hours of work."""
    probe = f"{url}.probe-{secrets.token_hex(4)}"
    client.write(probe, b"x")
    client.remove([probe])


def _digest(url: str) -> str:
    return hashlib.blake2b(url.encode(), digest_size=8).hexdigest()
