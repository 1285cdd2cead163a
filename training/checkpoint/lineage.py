"""Which checkpoint of a run descends from which, by what their manifests say, not by names and dates alone.

Every commit has a number, one more than any before it in the folder, and the hashes of the manifests of the
checkpoints that it descends from. So a checkpoint that is newer than what ``latest`` names is known to be the same
run's later state (``latest`` is stale, or the checkpoint was copied in), or the state of a future that was given up.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from program.schema import Count, structured
from program.untrusted import JSON_BYTES, InputError, json_value, read_bytes
from training.checkpoint.format.manifest import MANIFEST, MOST_ANCESTORS, Lineage


@dataclass(kw_only=True, slots=True, frozen=True)
class LineageCommit:
    """A folder with a checkpoint's name and a manifest."""

    path: Path
    iteration: int
    """By its name."""
    written: int | None
    """By its manifest; None where that says nothing, or cannot be read."""
    hash: str
    """Of its manifest; empty where that cannot be read."""
    lineage: Lineage
    time_ns: int
    """When the manifest came here: its own time of change, of a copy that of copying, unless the copy kept it."""

    @property
    def order(self) -> tuple[int, int]:
        """Later commits are larger; versions without a number come first, by iteration."""
        return self.lineage.number, self.iteration

    @property
    def is_misnamed(self) -> bool:
        """Whether it holds another iteration than its name says: a copy under another name, or one renamed."""
        return self.written is not None and self.written != self.iteration

    def descends_from(self, other: "LineageCommit") -> bool:
        return bool(other.hash) and other.hash in self.lineage.ancestors


@dataclass(kw_only=True, slots=True, frozen=True)
class CommitOrigin:
    """What of a manifest's ``about`` tells commits apart."""

    iteration: Count | None = None
    lineage: Lineage = field(default_factory=Lineage)


def read_commit(path: Path, iteration: int) -> LineageCommit:
    """What ``path`` says of itself; a manifest that cannot be read says nothing. Raises OSError where it is gone."""
    time_ns = (path / MANIFEST).stat().st_mtime_ns
    try:
        data = read_bytes(path / MANIFEST, JSON_BYTES)
    except InputError:
        data = b""
    return commit_of(data, path, iteration, time_ns)


def commit_of(manifest: bytes, path: Path, iteration: int, time_ns: int) -> LineageCommit:
    """What a manifest says. Its list of files is not checked: it is long where thousands of ranks wrote, and the load
    checks it."""
    own, about = "", CommitOrigin()
    try:
        values = json_value(manifest, path / MANIFEST)
        origin = {key: values["about"][key] for key in ("iteration", "lineage") if key in values["about"]}
        found, problems = structured(origin, CommitOrigin)
        if not problems and isinstance(values["hash"], str):
            own, about = values["hash"], found
    except (InputError, KeyError, TypeError):
        pass
    return LineageCommit(
        path=path, iteration=iteration, written=about.iteration, hash=own, lineage=about.lineage, time_ns=time_ns
    )


def newest(commits: Iterable[LineageCommit], named: LineageCommit | None, named_ns: int) -> LineageCommit | None:
    """The commit to continue from. named: what ``latest`` names, which was written at ``named_ns``.

    A descendant of it wins, the newest first, unless ``latest`` was written after that one came: somebody went back on
    purpose, as with Megatron's tracker file. Without a ``latest`` that counts, the last commit.
    """
    found = list(commits)
    if named is None:
        return max(found, key=lambda one: one.order, default=None)
    descendants = [one for one in found if one.descends_from(named)]
    if not descendants or named_ns > max(one.time_ns for one in descendants):
        return named
    return max(descendants, key=lambda one: one.order)


def in_order(commits: Iterable[LineageCommit], first: LineageCommit) -> list[LineageCommit]:
    """All of them in the order to try: ``first``, its ancestors, other earlier iterations, then later ones."""
    return [
        first,
        *sorted(
            (one for one in commits if one is not first),
            key=lambda one: (first.descends_from(one), one.iteration <= first.iteration, one.iteration),
            reverse=True,
        ),
    ]


def following(parent: LineageCommit | None, commits: Iterable[LineageCommit], loaded: str | None) -> Lineage:
    """The lineage of the next commit after ``parent``, in a folder with these ``commits``."""
    numbers = [one.lineage.number for one in commits]
    if parent is None:
        return Lineage(number=max(numbers, default=0) + 1, loaded=loaded)
    ancestors = (*filter(None, [parent.hash]), *parent.lineage.ancestors)[:MOST_ANCESTORS]
    number = max([*numbers, parent.lineage.number]) + 1
    return Lineage(number=number, ancestors=ancestors, loaded=loaded or parent.lineage.loaded)
