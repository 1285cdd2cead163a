"""Damage to the files of a checkpoint, from a seed; and what must be said of it."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from training.checkpoint.folders import LATEST
from training.checkpoint.format.manifest import MANIFEST
from training.checkpoint.format.reader import FileReader

PAGE_BYTES = 4096
TENSORS = ".bin"
"""Ending of the files that hold tensors: their content is what ``sizes`` does not look at."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Injection:
    """What was done, and what a load must find."""

    kind: str
    text: str
    named: tuple[str, ...]
    """Files of the checkpoint that must be named; empty where the checkpoint itself is whole."""
    tensors: tuple[str, ...] = ()
    """Keys of the tensors whose bytes changed, in the order of the index."""
    content_only: bool = False
    """Names and sizes are as before, and it is a file of tensors: ``sizes`` cannot see it."""
    warned: tuple[str, ...] = ()
    """Files that are no damage, and of which a warning is said."""
    spares_older: bool = True
    """Whether an older checkpoint is still good."""


Inject = Callable[[Path, Path, Random], Injection]
"""(newest checkpoint, older checkpoint, draw) -> what was done."""


def files(folder: Path) -> list[Path]:
    """All of a checkpoint's files."""
    return sorted(path for path in folder.iterdir() if path.is_file())


def some_file(folder: Path, draw: Random) -> Path:
    """One that is not empty; half of the time one with tensors, which would else be hit rarely."""
    there = [path for path in files(folder) if path.stat().st_size]
    return draw.choice([path for path in there if path.suffix == TENSORS] if draw.random() < 0.5 else there)


def flip_bit(newest: Path, older: Path, draw: Random) -> Injection:
    """One bit of one file."""
    path = some_file(newest, draw)
    data = bytearray(path.read_bytes())
    position, bit = draw.randrange(len(data)), draw.randrange(8)
    data[position] ^= 1 << bit
    return _rewritten("bit flip", path, bytes(data), f"bit {bit} of byte {position:,}")


def zero_page(newest: Path, older: Path, draw: Random) -> Injection:
    """4 KiB of zeros where there was something else; all of a file that is shorter."""
    path = some_file(newest, draw)
    data = path.read_bytes()
    start = 0
    for _ in range(1000):
        start = draw.randrange(max(1, len(data) - PAGE_BYTES))
        if any(data[start : start + PAGE_BYTES]):
            break
    size = min(PAGE_BYTES, len(data) - start)
    changed = data[:start] + bytes(size) + data[start + size :]
    return _rewritten("zeroed 4 KiB", path, changed, f"{size:,} bytes from {start:,} on")


def truncate(newest: Path, older: Path, draw: Random) -> Injection:
    """A file ends early: anywhere, at its last byte, or at once."""
    path = some_file(newest, draw)
    size = path.stat().st_size
    kept = draw.choice([0, size - 1, draw.randrange(size)])
    return _cut("truncation", path, kept)


def truncate_json(newest: Path, older: Path, draw: Random) -> Injection:
    """One of the JSON files ends early."""
    path = draw.choice([path for path in files(newest) if path.suffix in (".json", ".jsonl")])
    return _cut("truncated JSON", path, draw.randrange(path.stat().st_size))


def remove(newest: Path, older: Path, draw: Random) -> Injection:
    """A file is gone."""
    path = draw.choice(files(newest))
    path.unlink()
    return Injection(kind="missing file", text=path.name, named=(path.name,))


def add(newest: Path, older: Path, draw: Random) -> Injection:
    """A file that the run did not write."""
    name = draw.choice([".metadata", "common.pt", "__0_0.distcp", "rank_00099.bin", "state.json.partial", "x" * 200])
    (newest / name).write_bytes(draw.randbytes(draw.choice([0, 1, 5000])))
    return Injection(kind="extra file", text=name, named=(), warned=(name,))


def swap(newest: Path, older: Path, draw: Random) -> Injection:
    """Two files change places, or one is taken from the older checkpoint."""
    while True:
        first = draw.choice([path for path in files(newest) if path.name != MANIFEST])
        others = [path for path in files(newest) if path.name not in (MANIFEST, first.name)]
        second = draw.choice([*others, older / first.name])
        if first.read_bytes() != second.read_bytes():
            break
    within = second.parent == newest
    contents = first.read_bytes(), second.read_bytes()
    same_size = len(contents[0]) == len(contents[1])
    first.write_bytes(contents[1])
    if within:
        second.write_bytes(contents[0])
    changed = [first, second] if within else [first]
    return Injection(
        kind="swapped files",
        text=f"{first.name} and {'' if within else older.name + '/'}{second.name}",
        named=tuple(path.name for path in changed),
        content_only=same_size and all(path.suffix == TENSORS for path in changed),
    )


def empty_latest(newest: Path, older: Path, draw: Random) -> Injection:
    """``latest`` is there and says nothing."""
    (newest.parent / LATEST).write_bytes(b"")
    return Injection(kind="empty latest", text="0 bytes", named=())


def garbage_latest(newest: Path, older: Path, draw: Random) -> Injection:
    """``latest`` says something else."""
    garbage = draw.choice(
        [draw.randbytes(40), b"iter_9999999\n", b"../..\n", b"/\n", newest.name.encode()[:-1], b"\0" * 4096]
    )
    (newest.parent / LATEST).write_bytes(garbage)
    return Injection(kind="garbage latest", text=repr(garbage[:20]), named=())


def flip_everywhere(newest: Path, older: Path, draw: Random) -> Injection:
    """Every checkpoint is damaged: nothing may be loaded."""
    injection = flip_bit(newest, older, draw)
    truncate(older, newest, draw)
    return Injection(
        kind="every checkpoint damaged",
        text=f"{injection.text}, and a file of the older one cut",
        named=injection.named,
        tensors=injection.tensors,
        content_only=injection.content_only,
        spares_older=False,
    )


KINDS: Sequence[Inject] = (
    flip_bit, zero_page, truncate, remove, add, swap, truncate_json, empty_latest, garbage_latest, flip_everywhere,
)  # fmt: skip


def inject(number: int, newest: Path, older: Path, seed: str) -> Injection:
    """The ``number``-th damage: kinds in turn, everything else drawn from ``seed``."""
    return KINDS[number % len(KINDS)](newest, older, Random(seed))


def fresh_copy(source: Path, target: Path) -> None:
    """A copy of a folder of checkpoints, to be damaged, in place of the one before."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)


def _rewritten(kind: str, path: Path, data: bytes, text: str) -> Injection:
    before = path.read_bytes()
    tensors = _tensors_of(path, before, data) if path.suffix == TENSORS else ()
    path.write_bytes(data)
    return Injection(
        kind=kind,
        text=f"{path.name}: {text}",
        named=(path.name,),
        tensors=tensors,
        content_only=path.suffix == TENSORS,
    )


def _cut(kind: str, path: Path, kept: int) -> Injection:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(kept)
    return Injection(kind=kind, text=f"{path.name}: {kept:,} of {size:,} bytes", named=(path.name,))


def _tensors_of(path: Path, before: bytes, after: bytes) -> tuple[str, ...]:
    """Keys whose bytes differ, from the tables of the checkpoint while it is whole."""
    found = []
    with FileReader(path.parent) as reader:
        for key, info in reader.tensors.items():
            for piece in reader.pieces(key):
                size = info.piece_bytes(piece.shape)
                start = piece.position + info.number * size
                if piece.file == path.name and before[start : start + size] != after[start : start + size]:
                    found.append(key)
                    break
    return tuple(found)
