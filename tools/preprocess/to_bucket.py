"""Shards into a bucket: made on this machine's disk, and moved there when they are whole, each manifest last.

A folder of its own below ``--work_dir`` keeps the work, so that a killed command goes on where it was;
`X.json.uploaded` there says which manifest of a shard is in the bucket already. When all is there, the folder goes.
"""

import fcntl
import hashlib
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

import platformdirs

from data.bucket_shards import stem
from data.inputs import work_folder
from data.shards import bin_path, idx_path
from program.buckets import client, names, transfer
from program.errors import UserError
from program.untrusted import InputError, read_text
from tools.preprocess import worker_pool
from tools.preprocess.options import PreprocessOptions

UPLOADED = ".uploaded"


def make(options: PreprocessOptions, preprocess: Callable[[Path], None]) -> None:
    """Run ``preprocess`` with a prefix on a disk, and move what it made to ``options.output``.

    Raises UserError where the bucket cannot be written, before anything is read, or holds shards of that prefix from
    other work; and what ``preprocess`` raises.
    """
    url, overwrite = options.output, options.overwrite
    if problem := names.problem(url):
        raise UserError(f"--output {problem}")
    parent = options.work_dir or Path(platformdirs.user_cache_dir("triplane")) / "preprocess"
    folder = parent.absolute() / f"{names.last(url)}-{_digest(url.encode())}"
    prefix, ours = folder / names.last(url), _pattern(names.last(url), options.jsonl_key)
    folder.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"--output {url}: another command makes it now, in {folder}.") from None
        try:
            _check_writable(url)
            if not overwrite and not work_folder(prefix).is_dir() and (there := _there(url, ours)):
                raise UserError(f"--output {url}: {there[0]} is there already. Give another prefix, or --overwrite.")
            preprocess(prefix)
            _upload(prefix, url, ours, overwrite)
            shutil.rmtree(folder)
        except OSError as error:
            raise UserError(f"--output {url}: {error.filename}: {error.strerror}.") from None


def _pattern(name: str, jsonl_key: str) -> re.Pattern[str]:
    """Of the shards' names, without their endings: as this command gives them, and no other prefix's."""
    return re.compile(rf"{re.escape(name)}(-\d{{5,}}-of-\d{{5,}}(\.empty)?|_{re.escape(jsonl_key)}_document)")


def _there(url: str, ours: re.Pattern[str]) -> list[str]:
    """Objects of shards of this output."""
    found = (one.url for one in client.listed(url) if names.parent(one.url) == names.parent(url))
    return [one for one in found if stem(one) != one and ours.fullmatch(names.last(stem(one)))]


def _upload(prefix: Path, url: str, ours: re.Pattern[str], overwrite: bool) -> None:
    manifests = [one for one in sorted(prefix.parent.glob("*.json")) if ours.fullmatch(one.name.removesuffix(".json"))]
    new = [one for one in manifests if _mark(one) != _digest(one.read_bytes())]
    if overwrite:
        current = {
            names.joined(names.parent(url), file.name) for one in manifests if one not in new for file in _files(one)
        }
        stale = set(_there(url, ours)) - current
        client.remove(sorted(stale, key=lambda one: not one.endswith(".json")))
    files = [file for one in new for file in _files(one)]
    with worker_pool.progress(sum(file.stat().st_size for file in files), "uploading") as bar:
        for manifest in new:
            for file in _files(manifest):
                transfer.upload(file, names.joined(names.parent(url), file.name), bar.update)
            manifest.with_name(manifest.name + UPLOADED).write_text(_digest(manifest.read_bytes()))
    print(f"{len(manifests)} shard(s) are now at {url}")


def _mark(manifest: Path) -> str:
    """Digest of the manifest that was uploaded last; "" where none was."""
    try:
        return read_text(manifest.with_name(manifest.name + UPLOADED), 100)
    except (OSError, InputError):
        return ""


def _files(manifest: Path) -> list[Path]:
    """Of a shard; its manifest last."""
    prefix = manifest.with_name(manifest.name.removesuffix(".json"))
    return [*(file for file in (bin_path(prefix), idx_path(prefix)) if file.exists()), manifest]


def _check_writable(url: str) -> None:
    """Now, not after hours of work."""
    probe = f"{url}.probe-{secrets.token_hex(4)}"
    client.write(probe, b"x")
    client.remove([probe])


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
