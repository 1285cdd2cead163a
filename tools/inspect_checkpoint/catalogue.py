"""The checkpoints of a folder, whole or not, and what each says of itself."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from program.untrusted import InputError, read_json, read_text, read_toml
from tools.inspect_checkpoint.text import columns, size
from training.checkpoint import folders, stage_entry
from training.checkpoint.format.manifest import MANIFEST, DamagedError, read_manifest
from training.checkpoint.format.verify import Damage, Depth, damages

CONFIG = "config.toml"
Status = Literal["latest", "complete", "unfinished", "damaged"]


@dataclass(kw_only=True, slots=True, frozen=True)
class Checkpoint:
    """What a checkpoint says of itself. What it does not say, or cannot any more, is None or empty."""

    path: Path
    status: Status
    iteration: int | None
    samples: int | None
    """Consumed."""
    tokens: int | None
    """Consumed: samples times model.seq_length."""
    bytes: int
    files: int
    layout: str | None
    written: datetime
    """When the manifest was, or the folder, without one; in local time."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """From the manifest: versions, data."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """state.json."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """config.toml."""

    @property
    def model(self) -> str:
        """What its configuration calls the model; empty where it does not say."""
        section = _within(dict(self.config), "model")
        return next((one for one in (section.get("name"), section.get("shape")) if isinstance(one, str)), "")

    def to_json(self) -> dict[str, Any]:
        """Without state and configuration, which are files of their own."""
        return {
            "path": str(self.path),
            "status": self.status,
            "model": self.model or None,
            "iteration": self.iteration,
            "consumed_samples": self.samples,
            "consumed_tokens": self.tokens,
            "bytes": self.bytes,
            "files": self.files,
            "layout": self.layout,
            "written": self.written.isoformat(timespec="seconds"),
            "versions": self.about.get("versions"),
            "data": self.about.get("data"),
        }


def root_of(path: Path) -> Path | None:
    """The folder of checkpoints that a path means, be they complete or not; None for a single checkpoint."""
    if folders.is_complete(path):
        return None
    return next((root for root in (path, folders.checkpoints(path)) if _entries(root)), None)


def catalogue(root: Path) -> list[Checkpoint]:
    """Every checkpoint in ``root``, what killed saves left too, by iteration."""
    newest, found = folders.latest(root), list[Checkpoint]()
    for path in _entries(root):
        with contextlib.suppress(FileNotFoundError):  # a run that goes on has just removed or renamed it
            found.append(read(path, path == newest))
    return sorted(found, key=lambda one: (_number(one.path) or 0, one.path.name))


def _entries(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.is_dir() and _number(path) is not None] if root.is_dir() else []


def _number(path: Path) -> int | None:
    """The iteration that a name tells, of an unfinished checkpoint too."""
    return folders.iteration_of(Path(path.name.partition(folders.TEMPORARY)[0]))


def read(path: Path, is_latest: bool = False) -> Checkpoint:
    """What one says of itself, as far as it can be read."""
    about: Mapping[str, Any] = {}
    status: Status = "unfinished"
    sizes = [entry.stat().st_size for entry in path.iterdir() if entry.is_file()]
    if folders.is_complete(path):
        status = "latest" if is_latest else "complete"
        try:
            about = read_manifest(path).about
        except DamagedError:
            status = "damaged"
    state, config = _table(read_json, path / folders.STATE), _table(read_toml, path / CONFIG)
    samples = _whole(about.get("consumed_samples", _within(state, "progress").get("consumed_samples")))
    length = _whole(_within(config, "model").get("seq_length"))
    tokens = None
    if samples is not None and length:
        tokens = stage_entry.tokens_of(_within(state, "entries"), samples, length)
    stamp = path / MANIFEST if status != "unfinished" else path
    return Checkpoint(
        path=path,
        status=status,
        iteration=about.get("iteration", _number(path)),
        samples=samples,
        tokens=tokens,
        bytes=sum(sizes),
        files=len(sizes),
        layout=about.get("layout"),
        written=datetime.fromtimestamp(stamp.stat().st_mtime).astimezone(),
        about=about,
        state=state,
        config=config,
    )


def listed(found: Sequence[Checkpoint]) -> list[str]:
    """The list as text, a line each."""
    head = ("checkpoint", "samples", "tokens", "size", "layout", "written", "")
    rows = [
        (
            one.path.name,
            "-" if one.samples is None else f"{one.samples:,}",
            "-" if one.tokens is None else f"{one.tokens:,}",
            size(one.bytes),
            one.layout or "-",
            f"{one.written:%Y-%m-%d %H:%M}",
            one.status,
        )
        for one in found
    ]
    return columns([head, *rows], right=(1, 2, 3))


def _within(values: dict[str, Any], key: str) -> dict[str, Any]:
    found = values.get(key)
    return found if isinstance(found, dict) else {}


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _table(read: Callable[..., Any], path: Path) -> dict[str, Any]:
    """Empty where there is none that can be read."""
    try:
        return dict(read(path, dict[str, Any]))
    except (OSError, InputError):
        return {}


# ---- the files of a checkpoint against its manifest, hashed by several threads


MOST_THREADS = 8
"""xxhash and reads let go of Python's lock; a few threads are as fast as a disk."""


def check(folder: Path, depth: Depth) -> list[Damage]:
    """Every damage of a checkpoint, by file; on a terminal with a bar of the bytes read."""
    try:
        files = read_manifest(folder).files
    except DamagedError:
        return damages(folder, depth)
    shares = max(1, min(MOST_THREADS, os.cpu_count() or 1, len(files)))
    total = sum(facts.bytes for facts in files.values()) if depth == "hashes" else 0
    with bar(total, "hashing") as progress, ThreadPoolExecutor(shares) as pool:
        parts = [pool.submit(damages, folder, depth, (share, shares)) for share in range(shares)]
        _watch(parts, progress)
    return sorted({damage for part in parts for damage in part.result()})  # every share checks the names


@contextmanager
def bar(total_bytes: int, title: str) -> Iterator[Any]:
    """A progress bar by bytes on a terminal, nothing elsewhere."""
    hidden = not sys.stderr.isatty() or total_bytes == 0
    with tqdm(total=total_bytes, desc=title, unit="B", unit_scale=True, disable=hidden, leave=False) as progress:
        yield progress


def _watch(parts: list[Future[list[Damage]]], progress: Any) -> None:
    start, waiting = _bytes_read(), set(parts)
    while waiting:
        _, waiting = wait(waiting, timeout=0.2)
        progress.update(min(_bytes_read() - start, progress.total or 0) - progress.n)


def _bytes_read() -> int:
    """By this process so far, as the kernel counts (proc_pid_io(5)); 0 where it does not."""
    try:
        lines = read_text(Path("/proc/self/io")).splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("rchar:")))
    except (OSError, StopIteration, ValueError):
        return 0
