"""Which checkpoints a start may continue from, and in which order. One process looks."""

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from program.buckets import names
from program.errors import UserError
from training.checkpoint import folders
from training.checkpoint.bucket import stored
from training.checkpoint.format.manifest import MANIFEST
from training.checkpoint.lineage import LineageCommit, in_order
from training.config.checkpoint_config import CheckpointConfig


@dataclass(kw_only=True, slots=True, frozen=True)
class Start:
    """What rank 0 found."""

    own: bool
    """The candidates are the run's own checkpoints."""
    candidates: list[Path]
    """In the order to try them; empty where the run starts from initial weights."""
    lost: list[str]
    """Checkpoints whose manifest is gone, a sentence each."""
    notes: list[str]
    """What else is to be said."""
    loaded: str | None = None
    """``hash`` of the run's own checkpoint that ``checkpoint.load`` goes back to."""


def find_start(root: Path, config: CheckpointConfig, refused: Sequence[Path] = ()) -> Start:
    """Raises UserError where ``config.load`` leads nowhere. refused: checkpoints not to try again."""
    notes = [f"{path.name} got its name back: a commit of that iteration was killed" for path in folders.recover(root)]
    lost = [
        f"checkpoint {path} is damaged: {path / MANIFEST}: expected, not found" for path in folders.incomplete(root)
    ]
    notes += [
        f"warning: {one.path} holds iteration {one.written}, which its name does not say: it is neither resumed from "
        "nor deleted. Rename it to what it is, or move it away"
        for one in folders.misnamed(root)
    ]
    found = [one for one in folders.in_turn(root) if one.path not in refused]
    if not found:
        had_own = any(path.parent == root for path in refused)  # then config.load is not what the run continues
        others = folders.find(config.load, notes.append) if config.load is not None and not had_own else []
        others = [path for path in others if path not in refused]
        return Start(own=False, candidates=others, lost=lost, notes=notes)
    first, chosen = found[0], _loaded(root, config.load, found)
    if chosen is not None and first.lineage.loaded != chosen.hash:
        order = [one.path for one in in_order(found, chosen)]
        return Start(own=True, candidates=order, lost=lost, notes=notes, loaded=chosen.hash or None)
    if chosen is not None:
        notes.append(f"checkpoint.load {config.load}: this run went back to it before, and continues its newest since")
    elif config.load is not None:
        notes.append(f"checkpoint.load {config.load} is ignored: this run continues its own checkpoint")
    named, _ = folders.named_latest(root)
    if named is not None and named != first.path and named not in refused:
        commit = next((one for one in folders.commits(root) if one.path == named), None)
        notes.append(f"latest names {named.name}{_why_not(commit, first)}")
    return Start(own=True, candidates=[one.path for one in found], lost=lost, notes=notes)


@contextlib.contextmanager
def first_of_all(root: Path, config: CheckpointConfig) -> Iterator[Path | None]:
    """``first_candidate``, of the bucket as well: there a temporary folder with its small files. Raises UserError, too,
    where the server does not answer."""
    if problems := config.bucket_problems():  # before the server's own words quote a URL with a key in it
        raise UserError("\n".join(problems))
    with tempfile.TemporaryDirectory(prefix="triplane-first-") as scratch:
        found = in_bucket(root, config)
        if not found and (names.is_url(config.load or "") and not config.finetune and not folders.complete(root)):
            found = stored.find(config.load or "", "checkpoint.load")
        if not found:
            yield first_candidate(root, config)
            return
        folder = Path(scratch) / found[0].name.partition("-")[0]
        try:
            stored.fetched(found[0], folder, stored.small_files(found[0]))
        except OSError as error:
            raise UserError(stored.said(error, "checkpoint.bucket")) from None
        yield folder


def in_bucket(root: Path, config: CheckpointConfig) -> list[stored.StoredCheckpoint]:
    """What a start would fetch from ``config.bucket``, the best first. Raises UserError where the server does not
    answer."""
    try:
        return [] if config.bucket is None else stored.newer(root, config.bucket)
    except OSError as error:
        raise UserError(stored.said(error, "checkpoint.bucket")) from None


def has_own(root: Path, config: CheckpointConfig) -> bool:
    """Whether a run has checkpoints, here or in its bucket, so that ``config.load`` does not count. Raises UserError as
    ``in_bucket``."""
    return bool(folders.complete(root) or in_bucket(root, config))


def first_candidate(root: Path, config: CheckpointConfig) -> Path | None:
    """The checkpoint that a start now would try first to continue; None where it continues none. Only reads. Raises
    UserError where ``config.load`` leads nowhere."""
    found = folders.in_turn(root)
    if not found:
        return folders.find(config.load)[0] if config.load is not None and not config.finetune else None
    chosen = _loaded(root, config.load, found)
    return chosen.path if chosen is not None and found[0].lineage.loaded != chosen.hash else found[0].path


def _why_not(named: LineageCommit | None, taken: LineageCommit) -> str:
    """Why ``taken`` is continued and not what ``latest`` names."""
    if named is not None and taken.descends_from(named):
        return f"; {taken.path.name} descends from it and is newer: continuing from that"
    if named is not None and named.is_misnamed:
        return f", which holds iteration {named.written}: continuing from {taken.path.name}"
    return f", which is not continued: continuing from {taken.path.name}"


def _loaded(root: Path, load: str | None, commits: Sequence[LineageCommit]) -> LineageCommit | None:
    """The run's own checkpoint that ``checkpoint.load`` names; None where it names none of them."""
    path = Path(load or "").expanduser()
    if load is None or path.parent.resolve() != root.resolve():
        return None
    return next((one for one in commits if one.path.name == path.name), None)
