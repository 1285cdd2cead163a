"""A checkpoint from a bucket into the run's folder, by all ranks together: then it is loaded as any local one is."""

import dataclasses
import hashlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from parallel.groups import Ranks
from program.buckets.names import is_url
from program.errors import SharedFault, SharedMistake, UserError
from training.checkpoint import folders, room
from training.checkpoint.agreement import gathered, on_every_rank_for_long, on_first_rank
from training.checkpoint.bucket import stored
from training.checkpoint.bucket.stored import StoredCheckpoint, small_files
from training.checkpoint.format.manifest import MANIFEST, DamagedError, read_manifest
from training.checkpoint.format.verify import Damage, damages, share_of
from training.config.checkpoint_config import CheckpointConfig

FETCHED = "fetched"
"""The folder in RUN_DIR of what ``checkpoint.load`` names in a bucket, by a digest of its URL."""
MEBIBYTE = 2**20


def with_fetched(
    run_dir: Path, config: CheckpointConfig, ranks: Ranks, beat: Callable[[], None] = lambda: None
) -> CheckpointConfig:
    """Bring what a start would continue that a bucket has and ``run_dir`` has not; the section without URLs to load.

    Each rank downloads and verifies its share of the files; one that is damaged is said, and the one before it tried.
    Raises SharedMistake or SharedFault, on every rank, where the server does not give it or the disk does not take it.
    """
    root, own = folders.checkpoints(run_dir), config.bucket
    if own is not None:
        found = asked(partial(stored.newer, root, own), ranks)
        if (path := _first_whole(found, root, config, ranks, beat)) is not None:
            on_first_rank(partial(folders.point_to, path), ranks)
    load = config.load
    if load is None or not is_url(load) or on_first_rank(lambda: bool(folders.complete(root)), ranks):
        return config
    found = on_first_rank(partial(stored.find, load, "checkpoint.load"), ranks)
    folder = run_dir / FETCHED / hashlib.sha256(load.encode()).hexdigest()[:8]
    if (path := _first_whole(found, folder, config, ranks, beat)) is None:
        raise SharedMistake(f"checkpoint.load {load}: no good checkpoint is there, see above. Give another.")
    return dataclasses.replace(config, load=str(path))


def asked[T](action: Callable[[], T], ranks: Ranks) -> T:
    """``on_first_rank`` of what asks ``checkpoint.bucket``. An error that may pass by itself is a SharedFault, with
    which a new start may get further; any other a SharedMistake."""
    try:
        return on_first_rank(action, ranks)
    except OSError as error:
        is_mistake = isinstance(error, PermissionError | FileNotFoundError)
        raise (SharedMistake if is_mistake else SharedFault)(stored.said(error, "checkpoint.bucket")) from None


def _first_whole(
    found: list[StoredCheckpoint], root: Path, config: CheckpointConfig, ranks: Ranks, beat: Callable[[], None]
) -> Path | None:
    """The first that comes whole: where it lies then."""
    for one in found:
        began, target = time.monotonic(), root / (one.name.partition("-")[0] if one.iteration else one.name)
        if root.parent.name == FETCHED and on_first_rank(partial(folders.is_complete, target), ranks):
            return target
        temporary = root / f"{target.name}{folders.TEMPORARY}{one.name}"
        try:
            on_first_rank(partial(_begin, one, temporary), ranks)
            own = on_every_rank_for_long(partial(_share, one, temporary, config, ranks), ranks, beat)
            if damaged := gathered(own, ranks):
                ranks.say(f"checkpoint {one.url} is damaged: {damaged[0].text.replace(str(temporary), one.url)}")
                on_first_rank(partial(folders.remove, temporary), ranks)
                continue
            path = on_first_rank(partial(folders.give_name, temporary), ranks)
        except OSError as error:
            raise SharedFault(f"{one.url} was not fetched to {target}: {error}. Start again to go on there.") from None
        size = sum(facts.size for facts in one.files.values())
        ranks.say(f"fetched {one.url} ({size / MEBIBYTE:,.1f} MiB in {time.monotonic() - began:.1f} s)")
        return path
    return None


def _begin(of: StoredCheckpoint, folder: Path) -> None:
    """The folder to fetch into, with all small files. What a killed start has fetched of it stays. Raises UserError
    where the disk does not take it."""
    there = sum(path.stat().st_size for path in folder.iterdir()) if folder.is_dir() else 0
    needed = sum(facts.size for facts in of.files.values()) - there
    if text := room.problem(folder.parent, needed, len(of.files)):
        raise UserError(f"{of.url}: {text}")
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.name not in of.files:
            folders.remove(path)
    stored.fetched(of, folder, small_files(of))


def _share(of: StoredCheckpoint, folder: Path, config: CheckpointConfig, ranks: Ranks) -> list[Damage]:
    """Download this rank's files, and verify them."""
    share = (ranks.rank, ranks.identity.world_size)
    try:
        manifest = read_manifest(folder)
    except DamagedError as error:
        return [Damage(MANIFEST, str(error))]
    stored.fetched(of, folder, [name for name in share_of(manifest, share) if name in of.files])
    return damages(folder, config.verify, share)
