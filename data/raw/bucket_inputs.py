"""What a URL names among inputs: one object, all below a folder, or what fits a glob."""

import glob
import re

from data.raw.shard_files import OTHER_HALF, OURS
from program.buckets import client, names
from program.buckets.client import ObjectFacts
from program.errors import UserError


def find(url: str) -> tuple[list[ObjectFacts], bool]:
    """The objects, by name, and whether they are a folder's. Hidden ones (a part that begins with a dot or "_") and
    token shards are none of a folder or a glob, empty ones neither: consoles make them for folders.

    Raises UserError where there are none, or they cannot be seen.
    """
    if problem := names.problem(url):
        raise UserError(problem)
    try:
        if glob.has_magic(names.bare(url)):
            return _documents(url, client.globbed(url)), False
        try:
            return [client.facts(url)], False
        except FileNotFoundError:
            return _documents(url, client.listed(url.rstrip("/") + "/")), True
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}.") from None


def _documents(url: str, found: list[ObjectFacts]) -> list[ObjectFacts]:
    urls = {one.url for one in found}
    base = names.parent(re.split(r"[*?[]", url)[0]) if glob.has_magic(names.bare(url)) else url
    kept = [one for one in found if one.size and not _is_hidden(one.url, base) and not _is_of_shard(one.url, urls)]
    if not kept:
        held = f"{len(found)} object(s) that are empty, hidden or of token shards" if found else "nothing"
        raise UserError(f"no object, folder or glob {url}; found {held} there.")
    return kept


def _is_hidden(url: str, base: str) -> bool:
    return any(part.startswith((".", "_")) for part in url.removeprefix(base).split("/"))


def _is_of_shard(url: str, urls: set[str]) -> bool:
    """A manifest is known by its neighbours: to look into each .json would cost a request."""
    stem, dot, ending = url.rpartition(".")
    if dot + ending == ".json" and not url.endswith(".empty.json"):  # may be documents, whatever it is called
        return any(f"{stem}{half}" in urls for half in OTHER_HALF)
    return stem + OTHER_HALF.get(dot + ending, "?") in urls or OURS.fullmatch(names.last(url)) is not None
