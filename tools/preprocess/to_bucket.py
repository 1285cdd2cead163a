"""Shards into a bucket: made on this machine's disk, and moved there when they are whole, each manifest last.

A folder of its own below ``--work_dir`` keeps the work, so that a killed command goes on where it was;
`X.json.uploaded` there says which manifest of a shard is in the bucket already. When all is there, the folder goes.
"""

import contextlib
import filecmp
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import platformdirs

from data.shards import bin_path, idx_path
from program.buckets import client, names, transfer
from program.errors import UserError
from program.locks import locked
from tools.preprocess import worker_pool
from tools.preprocess.options import PreprocessOptions
from tools.preprocess.output import Output


def make(options: PreprocessOptions, preprocess: Callable[[Path], None]) -> None:
    """Run ``preprocess`` with a prefix on a disk, and move what it made to ``options.output``.

    Raises UserError where the bucket cannot be written, before anything is read, or holds shards of that prefix from
    other work; and what ``preprocess`` raises.
    """
    url = options.output
    if problem := names.problem(url):
        raise UserError(f"--output {problem}")
    parent = options.work_dir or Path(platformdirs.user_cache_dir("triplane")) / "preprocess"
    folder = parent.absolute() / f"{names.last(url)}-{hashlib.blake2b(url.encode(), digest_size=8).hexdigest()}"
    output = Output(folder / names.last(url))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locked(folder.with_name(f"{folder.name}.lock"), wait=False))
            except BlockingIOError:
                raise UserError(f"--output {url}: another command makes it now, in {folder}.") from None
            client.check_writable(url)
            if not options.overwrite and not output.folder.is_dir() and (there := _there(output, options)):
                raise UserError(f"--output {url}: {there[0]} is there already. Give another prefix, or --overwrite.")
            preprocess(output.prefix)
            _upload(output, options)
            shutil.rmtree(folder)
    except OSError as error:
        raise UserError(f"--output {url}: {error.filename}: {error.strerror}.") from None


def _there(output: Output, options: PreprocessOptions) -> list[str]:
    """Objects of shards of this output."""
    folder = names.parent(options.output)
    found = (one.url for one in client.listed(options.output) if names.parent(one.url) == folder)
    return [one for one in found if output.is_shard(names.last(one), options.jsonl_key)]


def _upload(output: Output, options: PreprocessOptions) -> None:
    url, here = names.parent(options.output), sorted(output.prefix.parent.glob("*.json"))
    manifests = [one for one in here if output.is_shard(one.name, options.jsonl_key)]
    new = [one for one in manifests if not _is_uploaded(one)]
    if options.overwrite:
        current = {names.joined(url, file.name) for one in manifests if one not in new for file in _files(one)}
        stale = set(_there(output, options)) - current
        client.remove(sorted(stale, key=lambda one: not one.endswith(".json")))
    with worker_pool.progress(sum(file.stat().st_size for one in new for file in _files(one)), "uploading") as bar:
        for manifest in new:
            for file in _files(manifest):
                transfer.upload(file, names.joined(url, file.name), bar.update)
            shutil.copyfile(manifest, _uploaded(manifest))
    print(f"{len(manifests)} shard(s) are now at {options.output}")


def _uploaded(manifest: Path) -> Path:
    """A copy of the manifest that was uploaded last."""
    return manifest.with_name(f"{manifest.name}.uploaded")


def _is_uploaded(manifest: Path) -> bool:
    return _uploaded(manifest).is_file() and filecmp.cmp(manifest, _uploaded(manifest), shallow=False)


def _files(manifest: Path) -> list[Path]:
    """Of a shard; its manifest last."""
    prefix = manifest.with_name(manifest.name.removesuffix(".json"))
    return [*(file for file in (bin_path(prefix), idx_path(prefix)) if file.exists()), manifest]
