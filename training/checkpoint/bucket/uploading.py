"""What a bucket lacks of a run's checkpoints, and what it has too much, put right. By one process of each node."""

import contextlib
import errno
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from program.buckets import client, names, transfer
from program.durable import replace_file
from program.schema import JSON, Text
from program.untrusted import JSON_BYTES, InputError, parse_json, read_bytes
from training.checkpoint import folders
from training.checkpoint.bucket import stored
from training.checkpoint.bucket.stored import StoredCheckpoint
from training.checkpoint.format.manifest import MANIFEST, CheckpointManifest, read_manifest
from training.checkpoint.format.verify import damages, share_of
from training.checkpoint.lineage import LineageCommit, in_order

OWNER = "owner.json"
FILES_AT_ONCE = 4
OTHERS_S = 300.0
"""How long nothing may come of other nodes' files before that is a failure."""


@dataclass(kw_only=True, slots=True, frozen=True)
class UploadOrder:
    """What a start wants of its bucket."""

    root: Text
    """RUN_DIR/checkpoints."""
    url: Text
    """``checkpoint.bucket``."""
    attempt: str
    """The start's name, as in OWNER."""
    node: int = 0
    nodes: int = 1
    keep: int = 1
    retain_interval: int | None = None
    milestones: tuple[int, ...] = ()


class BucketView(NamedTuple):
    """What is to be done."""

    newest: LineageCommit | None
    """The run's own newest checkpoint."""
    lacking: list[LineageCommit]
    """The run's own, to be uploaded in this order."""
    removable: list[StoredCheckpoint]
    """Once nothing is lacking: what retention does not keep, and what killed uploads have left."""


def claim(url: str, attempt: str) -> None:
    """Let a bucket's prefix be this start's: an earlier one's uploads, on another cluster too, end. Tries a write and a
    deletion. Raises OSError."""
    client.check_writable(names.joined(url, ""))
    client.write(names.joined(url, OWNER), json.dumps({"attempt": attempt, "host": os.uname().nodename}).encode())


def look(order: UploadOrder) -> BucketView:
    """One listing, ``latest``, and the manifests of complete checkpoints. Raises OSError."""
    root, rule = Path(order.root), (order.keep, order.retain_interval, order.milestones)
    found = stored.stored(stored.root_of(order.url))
    there = stored.commits(found)
    copies = {one.hash: one for one in there}
    own = folders.in_turn(root)
    if not own:
        return BucketView(None, [], [])
    old, first = folders.too_old(own, *rule), own[0]
    ours = [one for one in own if one not in old and one.hash and (one is first or first.descends_from(one))]
    lacking = [one for one in ours if one.hash not in copies]
    removable = [one for one in found if not one.is_complete]
    if (last := copies.get(first.hash)) is not None:
        doomed = folders.too_old(in_order(copies.values(), last), *rule)
        strangers = [one for one in doomed if last.lineage.number and not last.descends_from(one)]
        if strangers and damages(first.path, "hashes"):
            doomed = [one for one in doomed if one not in strangers]
        removable += [there[one] for one in doomed]
    return BucketView(first, lacking, removable)


def upload(order: UploadOrder, path: Path, report: transfer.Report = lambda _: None) -> int:
    """Bring a checkpoint into the bucket, by this node its share of the files, but for those that are there; by the
    first node the manifest when all are: bytes of all files.

    Raises OSError; also where the run's copy is damaged, or retention has taken it.
    """
    with _held(path) as folder:
        manifest = read_manifest(folder)
        target = names.joined(stored.root_of(order.url), stored.name_of(path, manifest.hash))
        share = (order.node, order.nodes)
        there = {one.url for one in client.listed(f"{target}/")}

        def send(name: str) -> None:
            url, size = names.joined(target, name), manifest.files[name].bytes
            if url in there and _is_there(url, size):
                report(size)
            else:
                transfer.upload(folder / name, url, report)

        with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            sent = pool.map(send, share_of(manifest, share))
            damaged = damages(folder, "hashes", share)  # meanwhile: nothing counts before the manifest is there
            list(sent)
        if damaged:
            raise OSError(errno.EIO, damaged[0].text.replace(str(folder), str(path)), str(path))
        if order.node == 0:
            _wait_for_others(target, manifest, set(share_of(manifest, share)))
            _commit(order, target, read_bytes(folder / MANIFEST, JSON_BYTES))
    return sum(facts.bytes for facts in manifest.files.values())


def share_bytes(order: UploadOrder, path: Path) -> int:
    """What this node has to send of a checkpoint. Raises DamagedError."""
    manifest = read_manifest(path)
    return sum(manifest.files[name].bytes for name in share_of(manifest, (order.node, order.nodes)))


@contextlib.contextmanager
def _held(path: Path) -> Iterator[Path]:
    """The folder that has this name now, whatever takes its name meanwhile."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _is_there(url: str, size: int | None = None) -> bool:
    """Asked of the object itself: a listing may lag."""
    try:
        return client.facts(url).size == size or size is None
    except FileNotFoundError:
        return False


def _wait_for_others(target: str, manifest: CheckpointManifest, mine: set[str]) -> None:
    wanted = {(names.joined(target, name), manifest.files[name].bytes) for name in manifest.files.keys() - mine}
    before, since = wanted, time.monotonic()
    while wanted and (left := wanted - {(one.url, one.size) for one in client.listed(f"{target}/")}):
        since = time.monotonic() if left != before else since
        before = left
        if time.monotonic() - since > OTHERS_S:
            text = f"{len(left)} files of other nodes have not come within {OTHERS_S:.0f} s; their logs say why"
            raise OSError(errno.ETIMEDOUT, text, min(left)[0])
        time.sleep(1.0)


def _commit(order: UploadOrder, target: str, manifest: bytes) -> None:
    """The manifest, which makes a checkpoint of what is there; then ``latest``."""
    check_owner(order)
    if not client.create(names.joined(target, MANIFEST), manifest):
        raise OSError(errno.EEXIST, "another manifest is there already", names.joined(target, MANIFEST))
    client.write(names.joined(names.parent(target), folders.LATEST), f"{names.last(target)}\n".encode())


def check_owner(order: UploadOrder) -> None:
    """Raises OSError where another start has claimed the prefix since."""
    url = names.joined(order.url, OWNER)
    try:
        owner = parse_json(client.read(url, folders.NAME_BYTES), dict[str, JSON], url)
    except InputError as error:
        raise OSError(errno.ESTALE, error.problem, url) from None
    if owner.get("attempt") != order.attempt:
        text = (
            f"another start writes there now, on {owner.get('host')}, attempt {owner.get('attempt')}; this one writes "
            "nothing there any more. A run needs a checkpoint.bucket of its own"
        )
        raise OSError(errno.ESTALE, text, url)


def remove(order: UploadOrder, one: StoredCheckpoint) -> None:
    """Take a checkpoint out of the bucket, its manifest first; or what has none, unless it has one by now. Raises
    OSError."""
    manifest = names.joined(one.url, MANIFEST)
    if not one.is_complete and _is_there(manifest):
        return
    check_owner(order)
    client.remove([manifest, *(facts.url for name, facts in one.files.items() if name != MANIFEST)])


def pin(root: Path, path: Path | None) -> None:
    """Let local retention leave a checkpoint while it is uploaded, and tell other nodes which it is."""
    if path is None:
        (root / folders.UPLOADING).unlink(missing_ok=True)
    else:
        replace_file(root / folders.UPLOADING, f"{path.name}\n".encode(), durable=False)
