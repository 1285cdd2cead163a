"""Shards in a bucket as this machine has them: the small files whole, of each `.bin` its ends and the blocks in use.

Below `CACHE/buckets/s3/BUCKET/…` lie copies of `.idx` and `.json`, and in the place of a `.bin` a file of its size with
its beginning and its end, which is otherwise a hole: what finds, opens and checks shards looks at nothing else, so that
it works on them as it is. `.X.bin.object` beside it says which object it stands for; what reads tokens looks there, and
reads through the cache of blocks (data/block_cache.py).
"""

import glob
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from data.bucket_copies import mark, mark_path, marked
from data.inputs import check_complete
from data.shards import FINGERPRINT_BYTES
from program.buckets import client, names, transfer
from program.buckets.client import ObjectFacts
from program.errors import UserError
from program.locks import locked

SUFFIXES = (".bin", ".idx", ".json")
FILES_AT_ONCE = 8
FOLDER = "buckets"
"""In the cache folder."""


def bring(url: str, cache: Path) -> list[str]:
    """What a URL of data.paths or a blend names: prefixes of copies on this machine, or the URLs of other objects.

    url: an object, a prefix, or a glob of either. Any number of processes may do so at once. Raises UserError where
    nothing is there, or it cannot be seen.
    """
    if problem := names.problem(url):
        raise UserError(f"data.paths: {problem}")
    try:
        is_glob = glob.has_magic(names.bare(url))
        found = client.globbed(url) if is_glob else client.listed(stem(url))
        shards = _chosen(url, found)
        if not shards:
            return _others(url, found)
        _bring_all([one for some in shards.values() for one in some], cache)
        if is_glob:
            full = [local(one, cache) for one in shards if not one.endswith(".empty")]
            check_complete(local(one, cache).with_name(names.last(one).removesuffix(".empty")) for one in shards)
            return [*map(str, full), *(one.url for one in found if stem(one.url) == one.url)]
        _remove_gone(url, found, cache)
        return [str(local(stem(url), cache))]
    except OSError as error:
        raise UserError(f"data.paths: {error.filename}: {error.strerror or error}.") from None


def shards_of(url: str) -> dict[str, list[ObjectFacts]]:
    """The objects of the shards that a prefix, one of a shard's objects, or a folder stands for, by the shard's prefix.

    Raises OSError where they cannot be listed.
    """
    return _chosen(url, client.listed(stem(url))) or _shards(client.listed(url.rstrip("/") + "/"))


def _chosen(url: str, found: list[ObjectFacts]) -> dict[str, list[ObjectFacts]]:
    is_glob = glob.has_magic(names.bare(url))
    return {one: some for one, some in _shards(found).items() if is_glob or is_of(one, stem(url))}


def local(url: str, cache: Path) -> Path:
    """Where the copy of an object, or of a prefix, lies. Raises UserError for a key that would lie elsewhere."""
    if any(part in ("", ".", "..") for part in names.bare(url).split("/")):
        raise UserError(f"{url}: an empty part, . or .. in its name; expected one that can be a file's. Rename it.")
    return cache / FOLDER / names.scheme(url) / names.bare(url)


def as_urls(text: str, cache: Path) -> str:
    """A message about copies as one about what they are copies of."""
    for scheme in names.EXTRAS:
        text = text.replace(f"{cache / FOLDER / scheme}/", f"{scheme}://")
    return text


def stem(url: str) -> str:
    """Without the ending of one of a shard's files; as it is without one."""
    return next((url.removesuffix(one) for one in SUFFIXES if url.endswith(one)), url)


def _shards(found: Iterable[ObjectFacts]) -> dict[str, list[ObjectFacts]]:
    """The objects of shards, by prefix: of what has an index, and of what says that it is empty."""
    urls = {one.url for one in found}
    stems: dict[str, list[ObjectFacts]] = {}
    for one in found:
        prefix = stem(one.url)
        if prefix != one.url and (f"{prefix}.idx" in urls or one.url.endswith(".empty.json")):
            stems.setdefault(prefix, []).append(one)
    return stems


def is_of(shard: str, prefix: str) -> bool:
    """Whether a shard may be what a prefix stands for (data/inputs.py says which of them it is)."""
    return re.fullmatch(r"(-\d{5,}-of-\d{5,}(\.empty)?|_.+_document)?", shard.removeprefix(prefix)) is not None


def _others(url: str, found: list[ObjectFacts]) -> list[str]:
    """Objects that are no shards: text, to be tokenised."""
    if glob.has_magic(names.bare(url)):
        if found:
            return [one.url for one in found]
    elif any(one.url == url for one in found):
        return [url]
    near = ", ".join(names.last(one.url) for one in found[:5])
    raise UserError(f"data.paths: no object or .bin/.idx prefix {url}; beginning so: {near or 'nothing'}.")


def _bring_all(found: list[ObjectFacts], cache: Path) -> None:
    """By one process of a machine at a time: one that came a moment later must not take from another what it opens."""
    (cache / FOLDER).mkdir(parents=True, exist_ok=True)
    with locked(cache / FOLDER / "bring.lock", needed=False):
        missing = [one for one in found if marked(local(one.url, cache)) != one]
        with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            for done in [pool.submit(_bring, one, local(one.url, cache)) for one in missing]:
                done.result()


def _bring(of: ObjectFacts, path: Path) -> None:
    """The mark comes first: what has a mark and not yet its file is fetched again, and a hole without one would be read
    as zeros."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    mark(path, of)
    if path.suffix == ".bin":
        _ends(of, path)
    else:
        transfer.download(of, path)


def _ends(of: ObjectFacts, path: Path) -> None:
    partial = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    with client.opened(of) as object_file, partial.open("wb") as file:
        file.truncate(of.size)
        for start in {0, max(0, of.size - FINGERPRINT_BYTES)}:
            if stop := min(start + FINGERPRINT_BYTES, of.size):
                os.pwrite(file.fileno(), object_file.read_range(start, stop), start)
        os.utime(file.fileno(), ns=(of.changed_ns, of.changed_ns))
    partial.replace(path)


def _remove_gone(url: str, found: list[ObjectFacts], cache: Path) -> None:
    """Copies of what the bucket has no more, as of a corpus that was made again in other parts."""
    there, prefix = {local(one.url, cache) for one in found}, local(stem(url), cache)
    for path in prefix.parent.glob(f"{glob.escape(prefix.name)}*"):
        if path.suffix in SUFFIXES and path.is_file() and path not in there:
            path.unlink(missing_ok=True)
            mark_path(path).unlink(missing_ok=True)
